"""Connections without proof: who is let in, and who makes room."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.wire.gate import ADDRESSES, BURST, HANDSHAKE_SECONDS, PER_SECOND, Gate, Visit


class Port:
    """A gate whose closed connections leave at once."""

    def __init__(self, limit: int) -> None:
        self.now = 0.0
        self.barred: list[str] = []
        self.gate = Gate(limit, lambda: self.now, self.barred.append)
        self.open: list[Visit] = []
        self.closed: list[Visit] = []

    def connect(self, address: str, deadline: float = 1.0) -> Visit | None:
        def close() -> None:
            assert visit is not None
            self.closed.append(visit)

        visit = self.gate.enter(address, close, deadline)
        if visit is not None:
            self.open.append(visit)
        self.open = [each for each in self.open if not each.evicted]
        return visit


def test_an_address_that_fills_the_port_makes_room_for_another_one() -> None:
    port = Port(4)
    hostile = [port.connect("bad") for _ in range(4)]
    worker = port.connect("good")
    assert worker is not None
    assert not worker.evicted
    assert port.closed == [hostile[0]]


def test_the_address_that_fills_the_port_is_refused() -> None:
    port = Port(4)
    for _ in range(4):
        port.connect("bad")
    assert port.barred == []
    assert port.connect("bad") is None
    assert port.closed == []
    assert port.barred == ["bad"]  # to close its next ones costs time, too


def test_many_addresses_do_not_push_each_other_out_of_their_handshakes() -> None:
    port = Port(4)
    for number in range(4):
        assert port.connect(str(number)) is not None
    assert port.connect("one more") is None
    assert port.closed == []


def test_idle_connections_of_many_addresses_keep_no_worker_out() -> None:
    """Each of 64 pods holds one connection until it is closed, and begins another one as often as its credit allows."""
    port = Port(64)
    pods = {str(number): port.connect(str(number), 5.0) for number in range(64)}
    admitted = 0
    for tick in range(20 * 100):
        port.now = tick / 20
        port.gate.expire(port.now)
        for address, visit in pods.items():
            if visit is None or visit.evicted:
                pods[address] = port.connect(address, port.now + 5)
        if tick % 20 == 19:
            worker = port.connect("worker", port.now + 5)
            if worker is not None and not worker.evicted:
                admitted += 1
                port.gate.proved(worker)
    assert admitted == 100


def test_a_worker_takes_the_place_of_an_idle_connection_of_its_own_address() -> None:
    port = Port(4)
    idle = [port.connect("node") for _ in range(4)]
    port.now = HANDSHAKE_SECONDS
    assert port.connect("node") is not None
    assert port.closed == idle[:1]


def test_who_has_the_most_pushes_out_no_other_address() -> None:
    port = Port(5)
    port.connect("worker")
    port.connect("worker")
    mine = [port.connect("bad") for _ in range(3)]
    port.now = 1.0
    assert port.connect("bad") is not None
    assert port.closed == mine[:1]


def test_a_proved_connection_is_closed_no_more() -> None:
    port = Port(1)
    proved = port.connect("a")
    assert proved is not None
    port.gate.proved(proved)
    port.gate.leave(proved)  # when it ends
    for _ in range(3):
        port.connect("a")
    assert port.closed == []
    assert port.gate.count == 1


def test_connections_end_at_their_deadline() -> None:
    port = Port(4)
    early, late = port.connect("a", 1.0), port.connect("a", 2.0)
    port.gate.expire(0.5)
    assert port.closed == []
    port.gate.expire(1.0)
    assert port.closed == [early]
    assert early is not None
    assert late is not None
    assert (early.evicted, late.evicted, port.gate.count) == (True, False, 1)


def begun(port: Port, address: str, times: int, end: Callable[[Visit], None]) -> int:
    """How many of so many connections, one after the other, were admitted."""
    admitted = 0
    for _ in range(times):
        if (visit := port.connect(address)) is not None:
            admitted += 1
            end(visit)
    return admitted


def test_an_address_without_proof_may_begin_few_connections() -> None:
    port = Port(4)
    assert begun(port, "bad", 1000, port.gate.leave) == BURST
    assert begun(port, "good", 1, port.gate.leave) == 1
    port.now = 8.0
    assert begun(port, "bad", 1000, port.gate.leave) == 8 * PER_SECOND
    port.now = 1e6
    assert begun(port, "bad", 1000, port.gate.leave) == BURST


def test_proof_pays_for_a_connection() -> None:
    port = Port(4)

    def proves(visit: Visit) -> None:
        port.gate.proved(visit)
        port.gate.proved(visit)  # once
        port.gate.leave(visit)

    assert begun(port, "worker", 10 * BURST, proves) == 10 * BURST
    assert begun(port, "worker", 1000, port.gate.leave) == BURST


def test_the_probes_of_a_node_are_always_admitted() -> None:
    """The operator's each second, and a slower one of a template: else a server would be unready, or killed."""
    port = Port(4)
    for second in range(2 * 3600):
        port.now = float(second)
        assert begun(port, "node", 1, port.gate.leave) == 1
        if second % 10 == 0:
            port.now += 0.5
            assert begun(port, "node", 1, port.gate.leave) == 1


def test_a_connection_that_finds_the_port_full_costs_no_credit() -> None:
    port = Port(1)
    held = port.connect("a")
    assert begun(port, "a", 1000, port.gate.leave) == 0
    assert held is not None
    port.gate.leave(held)
    assert begun(port, "a", 1000, port.gate.leave) == BURST - 1


def test_credit_is_kept_of_few_addresses() -> None:
    gate = Gate(1, lambda: 0.0)
    for number in range(3 * ADDRESSES):
        visit = gate.enter(str(number), lambda: None, 1.0)
        assert visit is not None
        gate.leave(visit)
    assert len(gate._credit._paid) <= ADDRESSES


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["connect", "connect", "connect", "leave", "wait"]),
        st.integers(0, 4),
        st.integers(0, 99),
    ),
    max_size=BURST,
)


@given(EVENTS, st.integers(1, 6))
def test_the_port_is_bounded_and_the_fair_share_of_an_address_is_safe(
    events: list[tuple[str, str, int]], limit: int
) -> None:
    port = Port(limit)
    for kind, address, pick in events:
        before = Counter(visit.address for visit in port.open)
        if kind == "wait":
            port.now += HANDSHAKE_SECONDS * pick / 50
        elif kind == "leave" and port.open:
            port.gate.leave(port.open.pop(pick % len(port.open)))
        elif kind == "connect":
            admitted = port.connect(str(address)) is not None
            if not admitted:  # with it, its address would have as many as any other
                assert sum(before.values()) == limit
                assert before[str(address)] + 1 >= max(before.values())
        after = Counter(visit.address for visit in port.open)
        assert sum(after.values()) == port.gate.count <= limit
        for each, count in before.items():
            if (
                kind == "connect" and after[each] < count
            ):  # it made room: it had the most, and still has a share
                assert count == max(before.values())
                assert after[each] >= before[str(address)]
