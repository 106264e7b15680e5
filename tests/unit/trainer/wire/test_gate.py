"""Connections without proof: who is let in, and who makes room."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.wire.gate import Gate, Visit


class Port:
    """A gate whose closed connections leave at once."""

    def __init__(self, limit: int) -> None:
        self.gate = Gate(limit)
        self.open: list[Visit] = []
        self.closed: list[Visit] = []

    def connect(self, address: str, deadline: float = 1.0) -> Visit | None:
        visit = self.gate.enter(address, lambda: self.closed.append(visit), deadline)
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
    assert port.connect("bad") is None
    assert port.closed == []


def test_many_addresses_do_not_push_each_other_out_of_their_handshakes() -> None:
    port = Port(4)
    for number in range(4):
        assert port.connect(str(number)) is not None
    assert port.connect("one more") is None
    assert port.closed == []


def test_a_proved_connection_is_closed_no_more() -> None:
    port = Port(1)
    proved = port.connect("a")
    assert proved is not None
    port.gate.leave(proved)
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


EVENTS = st.lists(
    st.tuples(st.sampled_from(["connect", "connect", "leave"]), st.integers(0, 4), st.integers(0, 99))
)


@given(EVENTS, st.integers(1, 6))
def test_the_port_is_bounded_and_the_fair_share_of_an_address_is_safe(events: list, limit: int) -> None:
    port = Port(limit)
    for kind, address, pick in events:
        before = Counter(visit.address for visit in port.open)
        if kind == "leave" and port.open:
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
