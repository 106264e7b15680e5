"""Bounds the connections of a port that have not proved who they are.

When a port has as many as it may have, a new connection takes the place of the oldest one of the addresses that have
the most. Where its own address would then have as many as these, it does so only if that one has had the time of a
handshake, and is refused otherwise. So neither a pod that fills the port keeps workers out, nor many pods with an idle
connection each; and many workers that connect at once do not push each other out of their handshakes. A fixed number
for each address would refuse the workers of one machine, or let a few pods fill the port.

A connection costs a thread, and with TLS a handshake (1 ms of a core), however soon it ends. So each address also has a
credit, which a proof pays back: without it a connection is closed at once. Whoever is refused is barred in the kernel
for a moment, because closing connections costs time as well.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable

BURST = 256
"""Connections without proof that an address may begin at once; the workers of one machine share it."""
PER_SECOND = 1.25
"""And after that: the kubelet's readiness probe takes one, from its node's address, and a template may have another."""
HANDSHAKE_SECONDS = 0.1
"""What a handshake takes at most, also where as many as a port may have run at once: milliseconds each, with TLS. Who
is to keep the others out has to begin `limit` connections in this time, again and again."""
ADDRESSES = 4096
"""In debt at a time. With more, all begin anew: the cost of a connection is bounded by the `limit` still."""


class Visit:
    """A connection without proof, from `address`. `close` may be replaced, and is called from any thread."""

    def __init__(self, address: str, close: Callable[[], None], begun: float, deadline: float) -> None:
        self.address = address
        self.close = close
        self.begun = begun
        self.deadline = deadline
        self.evicted = False


class Credit:
    """Of each address; not thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._paid: dict[str, float] = {}
        """When all that an address has begun will be paid, in units of the time that pays for one."""

    def take(self, address: str) -> bool:
        """Whether the address may begin a connection, which is then counted."""
        now = self._clock() * PER_SECOND
        if len(self._paid) >= ADDRESSES and address not in self._paid:
            self._paid = {each: paid for each, paid in self._paid.items() if paid > now}
            if len(self._paid) >= ADDRESSES:
                self._paid.clear()
        paid = max(now, self._paid.get(address, now)) + 1
        if paid > now + BURST:
            return False
        self._paid[address] = paid
        return True

    def back(self, address: str) -> None:
        """One of its connections costs nothing."""
        if address in self._paid:
            self._paid[address] -= 1


class Gate:
    """At most `limit` visits at a time. Thread-safe. `bar` is called with an address that is refused."""

    def __init__(
        self,
        limit: int,
        clock: Callable[[], float] = time.monotonic,
        bar: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._limit, self._bar, self._clock = limit, bar, clock
        self._credit = Credit(clock)
        self._visits: dict[str, OrderedDict[Visit, None]] = {}
        """By address, oldest first."""
        self._count = 0
        self._lock = threading.Lock()

    def enter(self, address: str, close: Callable[[], None], deadline: float = math.inf) -> Visit | None:
        """Admit a connection, and close another one if the port is full; None if it is refused.

        `deadline`: for `expire`.
        """
        visit, evicted = Visit(address, close, self._clock(), deadline), None
        with self._lock:
            if not self._credit.take(address):
                self._bar(address)
                return None
            if self._count >= self._limit and (evicted := self._evict(visit)) is None:
                self._credit.back(address)
                self._bar(address)
                return None
            self._visits.setdefault(address, OrderedDict())[visit] = None
            self._count += 1
        if evicted is not None:
            evicted.close()
        return visit

    def proved(self, visit: Visit) -> None:
        """The connection has proved itself."""
        with self._lock:
            if self._remove(visit):
                self._credit.back(visit.address)

    def leave(self, visit: Visit) -> None:
        """The connection has ended."""
        with self._lock:
            self._remove(visit)

    def expire(self, now: float) -> None:
        """Close the connections whose deadline has passed."""
        with self._lock:
            late = [visit for visits in self._visits.values() for visit in visits if visit.deadline <= now]
            for visit in late:
                visit.evicted = True
                self._remove(visit)
        for visit in late:
            visit.close()

    @property
    def count(self) -> int:
        """The number of visits."""
        return self._count

    def _evict(self, newcomer: Visit) -> Visit | None:
        """Remove the connection whose place this one may take, and return it."""
        own, most = len(self._visits.get(newcomer.address, ())), max(map(len, self._visits.values()))
        # With the most already, an address pushes out none but its own.
        among = [self._visits[newcomer.address]] if own == most else self._visits.values()
        visit = min((next(iter(each)) for each in among if len(each) == most), key=lambda each: each.begun)
        if most <= 1 + own and newcomer.begun - visit.begun < HANDSHAKE_SECONDS:
            return None
        visit.evicted = True
        self._remove(visit)
        return visit

    def _remove(self, visit: Visit) -> bool:
        """Whether it was there."""
        if (visits := self._visits.get(visit.address)) is None or visit not in visits:
            return False
        del visits[visit]
        self._count -= 1
        if not visits:
            del self._visits[visit.address]
        return True


def shut(sock: socket.socket) -> None:
    """Wake the thread that waits on a socket; it then closes it."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)  # not TLS's own, which would wait for the peer
