"""The memory of requests in flight: its bound, its order, and its growth while links are slow."""

import threading
from contextlib import ExitStack

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import pool as pool_module
from shoal_trainer.ps.pool import KEEP_SECONDS, MAX_EXTRA, SLOW_SECONDS, Loan, PiecePool
from shoal_trainer.wire.header import Codec

SLOW = SLOW_SECONDS[0]


@pytest.fixture(autouse=True)
def pieces_of_16_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PIECE_BYTES", 16)


def complete(loan: Loan) -> bool:
    return sum(piece.nbytes for piece in loan.granted) == loan.nbytes


def waiting(loan: Loan) -> None:
    """Return once a thread waits for a piece of the loan."""
    while not loan.changed._waiters:  # type: ignore[attr-defined]
        pass


def test_answer_hands_its_pieces_to_the_oldest_request() -> None:
    pool = PiecePool(limit=0)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(pool.lend(40)) for _ in range(3))
        assert complete(first)
        sent = []
        for piece in first.return_after_use():
            sent.append(piece.nbytes)
            assert sum(p.nbytes for p in second.granted) == 16 * (len(sent) - 1)
        assert sent == [16, 16, 8]
        assert complete(second)
        assert not third.granted
        assert pool.made == 40


def test_request_receives_while_it_waits_for_its_later_pieces() -> None:
    pool, received = PiecePool(limit=0), []
    with pool.lend(48) as first:
        sending = first.return_after_use()
        next(sending)
        with pool.lend(48) as second:
            taking = second.take()
            next(sending)  # one piece is sent
            received.append(next(taking))

            def rest() -> None:
                received.extend(taking)

            thread = threading.Thread(target=rest)
            thread.start()
            waiting(second)
            assert len(received) == 1
            for _ in sending:
                pass
            thread.join(20)
            assert len(received) == 3
    assert pool.made == 48


def test_values_are_views_of_the_pieces() -> None:
    with PiecePool().lend(40) as loan:
        for number, piece in enumerate(loan.take()):
            piece[:] = number
        payload = loan.payload(Codec.BF16)
    assert payload.shape == (20,)
    assert [(part.start, part.stop, set(values)) for part, values in payload.parts(7, 17)] == [
        (7, 8, {0}),
        (8, 16, {0x101}),
        (16, 17, {0x202}),
    ]
    assert payload.arrays[0].dtype == np.uint16


def test_a_fifth_of_the_model_is_added_to_the_limit() -> None:
    pool = PiecePool(limit=10)
    with pool.lend(40, 350) as first, pool.lend(40, 350) as second, pool.lend(40, 350) as third:
        assert complete(first)
        assert complete(second)
        assert not third.granted


def test_waiting_ends_with_patience() -> None:
    pool = PiecePool(limit=0)
    with pool.lend(32), pool.lend(32, patience=0.02) as second, pytest.raises(Unreachable, match="no memory"):
        list(second.take())
    with pool.lend(32, patience=0) as third:  # what is free needs no wait
        assert len(list(third.take())) == 2


def test_pool_grows_for_slow_links_and_shrinks_later() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)

    def one() -> None:
        nonlocal now
        with pool.lend(40) as loan:
            assert complete(loan)
            now += 0.1

    with pool.lend(40):
        with pool.lend(40) as second:
            now += SLOW
            assert len(list(second.take())) == 3
            assert pool.extra == 1
        for _ in range(20):  # fast links share the second message's memory
            one()
        assert pool.made == 80
    now += KEEP_SECONDS + 1
    one()
    assert pool.extra == 0
    assert pool.made <= 40


def test_slow_answer_does_not_delay_others_by_its_trickle() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)
    with pool.lend(160) as slow, pool.lend(160) as second:
        for index, _ in enumerate(slow.return_after_use()):
            now += 0.3
            if index == 4:
                break
        assert not complete(second)
        assert len(list(second.take())) == 10
        assert pool.extra == 1


def test_pool_does_not_grow_beyond_its_maximum() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)
    with ExitStack() as slow:
        for _ in range(1 + MAX_EXTRA):
            loan = slow.enter_context(pool.lend(32))
            now += SLOW
            list(loan.take())
        last = slow.enter_context(pool.lend(32, patience=SLOW))
        now += SLOW
        waiter = threading.Thread(target=lambda: [*last.take()])
        waiter.start()
        waiting(last)
        assert (pool.extra, pool.made) == (MAX_EXTRA, 32 * (1 + MAX_EXTRA))
        for _ in loan.return_after_use():
            pass
        waiter.join(20)
        assert complete(last)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    limit=st.integers(0, 120),
    steps=st.lists(st.tuples(st.sampled_from(["ask", "send", "close"]), st.integers(1, 60)), max_size=60),
)
def test_memory_is_bounded_and_nobody_waits_for_ever(limit: int, steps: list[tuple[str, int]]) -> None:
    pool, loans = PiecePool(limit=limit), []

    def close(index: int) -> None:
        loans.pop(index)[0].close()

    largest = 0
    for what, number in steps:
        index = number % len(loans) if loans else 0
        if what == "ask":
            stack = ExitStack()
            loans.append((stack, stack.enter_context(pool.lend(number)), None))
            largest = max(largest, number)
        elif what == "send" and loans and complete(loans[index][1]):
            stack, loan, sending = loans[index]
            sending = sending or loan.return_after_use()
            next(sending, None)
            loans[index] = stack, loan, sending
        elif what == "close" and loans:
            close(index)
        assert pool.made <= max(limit, largest)
        lent = [piece for _, loan, _ in loans for piece in loan.outstanding()]
        assert len({id(piece) for piece in lent}) == len(lent), "a piece is lent twice"
        missing = [loan for _, loan, _ in loans if loan.missing]
        assert all(not loan.granted for loan in missing[1:]), "only the oldest is given pieces"
    while loans:  # whoever has all its memory finishes; so does everyone in the end
        index = next(index for index, (_, loan, _) in enumerate(loans) if complete(loan))
        close(index)
    assert pool.made <= max(limit, largest)
