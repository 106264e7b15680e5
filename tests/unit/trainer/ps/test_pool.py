"""The memory of requests in flight: its bound, its order, and its growth while links are slow."""

import threading
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal_trainer.errors import Unreachable
from shoal_trainer.ps import pool as pool_module
from shoal_trainer.ps.pool import MAX_SLOW, SLOW_SECONDS, Loan, PiecePool
from shoal_trainer.wire.header import Codec
from tests.unit.trainer.ps.cluster import until

SLOW = SLOW_SECONDS[0]


@pytest.fixture(autouse=True)
def pieces_of_64_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "PIECE_BYTES", 64)


def complete(loan: Loan) -> bool:
    return not loan.missing


def test_answer_hands_its_pieces_to_the_oldest_request() -> None:
    pool = PiecePool(limit=0)
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(pool.lend(170)) for _ in range(3))
        assert complete(first)
        sent: list[int] = []
        for piece in first.return_after_use():
            assert len(second.pieces) == len(sent)
            sent.append(piece.nbytes)
        assert sent == [64, 64, 42]
        assert complete(second)
        assert not third.pieces
        assert pool.made == 192


def test_request_receives_while_it_waits_for_its_later_pieces() -> None:
    pool, received = PiecePool(limit=0), []
    with pool.lend(192) as first, pool.lend(192) as second:
        sending, taking = first.return_after_use(), second.take()
        next(sending)
        next(sending)  # one piece is sent
        received.append(next(taking))
        thread = threading.Thread(target=lambda: received.extend(taking))
        thread.start()
        until(lambda: bool(second.changed._waiters))  # type: ignore[attr-defined]
        assert len(received) == 1
        for _ in sending:
            pass
        thread.join(20)
        assert len(received) == 3
        assert second.waited > 0
        assert pool.made == 192


def test_values_are_views_of_the_pieces() -> None:
    with PiecePool().lend(150) as loan:
        for number, piece in enumerate(loan.take()):
            piece[:] = number
        payload = loan.payload(Codec.BF16, 75)
        assert payload.shape == (75,)
        assert [(part.start, part.stop, set(values)) for part, values in payload.parts(31, 75)] == [
            (31, 32, {0}),
            (32, 64, {0x101}),
            (64, 75, {0x202}),
        ]
        assert payload.arrays[0].dtype == np.uint16


def test_messages_of_one_size_reuse_their_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, allocate = PiecePool(limit=330), pool_module._allocate
    made: list[int] = []

    def counted(size: int) -> Any:
        made.append(size)
        return allocate(size)

    monkeypatch.setattr(pool_module, "_allocate", counted)
    for _ in range(10):
        with pool.lend(150) as first, pool.lend(150) as second, pool.lend(150) as third:
            for loan in (first, second, third):
                for _ in loan.take():
                    pass
                for _ in loan.return_after_use():
                    pass
    assert made == [64] * 5


def test_a_tenth_of_the_model_is_added_to_the_limit() -> None:
    pool = PiecePool(limit=27)
    with pool.lend(128, 2280) as first, pool.lend(128, 2280) as second, pool.lend(128, 2280) as third:
        assert complete(first)
        assert not complete(second)
        assert len(second.pieces) == 1  # 27 + 228 bytes are three pieces
        assert not third.pieces


def test_waiting_ends_with_patience() -> None:
    pool = PiecePool(limit=0)
    with (
        pool.lend(128),
        pool.lend(128, patience=0.02) as second,
        pytest.raises(Unreachable, match="no memory"),
    ):
        list(second.take())
    with pool.lend(128, patience=0) as third:  # what is free needs no wait
        assert len(list(third.take())) == 2


def test_empty_message_needs_no_memory() -> None:
    pool = PiecePool(limit=0)
    with pool.lend(128), pool.lend(128), pool.lend(0) as empty:
        assert list(empty.take()) == []
        assert empty.payload(Codec.FP32, 0).size == 0
        assert list(empty.return_after_use()) == []
    with pool.lend(128) as loan:
        assert complete(loan)


def test_memory_of_slow_requests_does_not_count() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)
    with ExitStack() as slow:
        for _ in range(1 + MAX_SLOW):
            assert complete(slow.enter_context(pool.lend(128)))
            with pool.lend(128) as fast:
                assert not fast.pieces
            now += SLOW
        last = slow.enter_context(pool.lend(128))
        assert not last.pieces
        assert pool.made == 128 * (1 + MAX_SLOW)
    for _ in range(3):
        with pool.lend(128) as fast:
            assert complete(fast)
    assert pool.made == 128


def test_waiting_request_notices_that_another_has_become_slow() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)
    with pool.lend(128), pool.lend(128) as second:
        now += SLOW
        assert len(list(second.take())) == 2
        assert pool.made == 256
    assert pool.made == 128


def test_slow_answer_does_not_delay_others_by_its_trickle() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)
    with pool.lend(640) as slow, pool.lend(640) as second:
        sending = slow.return_after_use()
        for _ in range(5):
            next(sending)
            now += 0.3
        assert complete(second)
        assert pool.made == 640 + 6 * 64
    assert pool.made == 640


def test_memory_returns_to_its_limit_while_fast_requests_overlap() -> None:
    now = 0.0
    pool = PiecePool(limit=0, clock=lambda: now)
    with pool.lend(128):
        now += SLOW
        with pool.lend(128) as second:
            assert complete(second)
    for _ in range(20):
        with pool.lend(128) as one, pool.lend(128) as other:
            assert complete(one)
            assert not other.pieces
            now += 0.1
    assert pool.made == 128


def test_failed_allocation_leaves_the_pool_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, allocate = PiecePool(limit=0), pool_module._allocate

    def fail(size: int) -> object:
        raise OSError("no memory")

    monkeypatch.setattr(pool_module, "_allocate", fail)
    with pool.lend(128, patience=0) as loan, pytest.raises(Unreachable, match="no memory"):
        next(loan.take())
    monkeypatch.setattr(pool_module, "_allocate", allocate)
    with pool.lend(128) as loan:
        assert complete(loan)
    assert pool.made == 128


@settings(
    max_examples=examples(300), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    limit=st.integers(0, 4000),
    steps=st.lists(
        st.tuples(st.sampled_from(["ask", "send", "close", "later"]), st.integers(1, 1800)), max_size=60
    ),
)
def test_memory_is_bounded_and_nobody_waits_for_ever(
    monkeypatch: pytest.MonkeyPatch, limit: int, steps: list[tuple[str, int]]
) -> None:
    monkeypatch.setattr(
        pool_module, "PIECE_BYTES", 256
    )  # above the alignment, so that sizes of pieces differ
    now, largest = 0.0, 0
    pool = PiecePool(limit=limit, clock=lambda: now)
    loans: list[Any] = []

    def close(index: int) -> None:
        loans.pop(index)[0].close()

    def check() -> None:
        held = [piece for _, loan, _ in loans for piece in loan.pieces]
        assert len({id(piece) for piece in held}) == len(held), "a piece is lent twice"
        free = sum(len(piece) for pieces in pool._free.values() for piece in pieces)
        assert pool.made == free + sum(map(len, held))
        slow = [sum(map(len, loan.pieces)) for loan, since in pool._complete.items() if now - since >= SLOW]
        assert pool.made - free <= max(limit, largest) + sum(slow[:MAX_SLOW])
        if not slow:
            assert pool.made <= max(limit, largest)
        incomplete = [loan for _, loan, _ in loans if not complete(loan)]
        assert all(not loan.pieces for loan in incomplete[1:]), "only the oldest is given pieces"

    for what, number in steps:
        index = number % len(loans) if loans else 0
        if what == "ask":
            stack = ExitStack()
            loan = stack.enter_context(pool.lend(number))
            loans.append((stack, loan, loan.return_after_use()))
            largest = max(largest, loan.count * loan.piece_bytes)
        elif what == "later":
            now += number / 900
        elif what == "send" and loans and complete(loans[index][1]):
            next(loans[index][2], None)
        elif what == "close" and loans:
            close(index)
        check()
    while loans:  # a request that has all its memory ends; so does everyone in the end
        close(next(index for index, (_, loan, _) in enumerate(loans) if complete(loan)))
        check()
    assert pool.made <= max(limit, largest)


def test_memory_of_the_pod_beside_the_model_and_its_copy_is_for_messages() -> None:
    model = 10_000
    pool = PiecePool(limit=0, memory=pool_module.RESERVED + 2 * model + 256)
    with pool.lend(128, model) as first, pool.lend(128, model) as second, pool.lend(128, model) as third:
        assert complete(first)
        assert complete(second)
        assert not complete(third) or pool.made <= 0.2 * model


def test_messages_have_no_more_memory_than_is_of_use() -> None:
    pool = PiecePool(limit=0, memory=1 << 40)
    with ExitStack() as stack:
        loans = [stack.enter_context(pool.lend(128)) for _ in range(pool_module.MAX_MESSAGES + 1)]
        assert [complete(loan) for loan in loans] == [True] * pool_module.MAX_MESSAGES + [False]


def test_a_pod_with_too_little_memory_still_takes_one_message() -> None:
    pool = PiecePool(limit=0, memory=1 << 20)
    with pool.lend(128, 10_000_000) as first:
        assert complete(first)


@pytest.mark.parametrize("whole", [False, True])
def test_a_request_waits_for_its_first_piece_or_for_all(whole: bool) -> None:
    pool = PiecePool(limit=64)
    with pool.lend(128) as first, pool.lend(128) as second:
        assert complete(first)
        assert not second.granted(0.0, whole=whole)
        sending = first.return_after_use()
        next(sending)
        next(sending)  # one piece is sent
        assert second.granted(0.0, whole=whole) is not whole
        for _ in sending:
            pass
        assert second.granted(0.0, whole=True)
