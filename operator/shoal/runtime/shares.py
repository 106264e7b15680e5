"""Places that namespaces share: what is slow in one of them costs that one.

A key takes a place only while more are free than it has: alone it gets half of them, beside it the next gets half of
the rest, and so on. So one whose requests all hang, since a webhook of its namespace does, leaves the others theirs; up
to `2**k` places, k such keys leave one. A place that is given back goes to who has fewest, in turns.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Hashable


class Shares:
    """So many places."""

    def __init__(self, places: int) -> None:
        self._free = places
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """In turns: who had a place last is at the end."""

    def open_to(self, key: Hashable) -> bool:
        """Whether it would get a place at once. While some of a key wait, it would not."""
        return self._held[key] < self._free

    def place(self, key: Hashable) -> _Place:
        """Have a place of this key's share, in `async with`."""
        return _Place(self, key)

    async def enter(self, key: Hashable) -> None:
        """Have a place until `leave`."""
        if self.open_to(key):
            self._take(key)
        else:
            await self._turn(key)

    async def _turn(self, key: Hashable) -> None:
        """Wait until a place was taken for the caller, the first of a key first."""
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # it had been taken already
                self.leave(key)
            raise

    def _take(self, key: Hashable) -> None:
        self._free -= 1
        self._held[key] += 1

    def leave(self, key: Hashable) -> None:
        """Give a place back."""
        self._free += 1
        self._held[key] -= 1
        if not self._held[key]:
            del self._held[key]
        if key in self._waiting:
            self._waiting[key] = self._waiting.pop(key)
        # Where it is not open to who has fewest, it is to nobody.
        while self._waiting and self.open_to(first := min(self._waiting, key=self._held.__getitem__)):
            turns = self._waiting.pop(first)
            turn = turns.popleft()
            if turns:
                self._waiting[first] = turns
            if not turn.cancelled():
                self._take(first)
                turn.set_result(None)


class _Place:
    """A place. An object: a generator of `contextlib` takes several times as long, and each request has two."""

    __slots__ = ("_key", "_shares")

    def __init__(self, shares: Shares, key: Hashable) -> None:
        self._shares, self._key = shares, key

    async def __aenter__(self) -> None:
        await self._shares.enter(self._key)

    async def __aexit__(self, *_error: object) -> None:
        self._shares.leave(self._key)
