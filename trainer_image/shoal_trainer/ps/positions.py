"""A set of positions, as sorted intervals that do not touch. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Positions:
    """Positions from 0 on. All intervals are half-open, [start, stop)."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0
        for start, stop in intervals:
            self.add(start, stop)

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """What of [start, stop) is not in the set."""
        found = []
        at = bisect_right(self._stops, start)
        while at < len(self._starts) and self._starts[at] < stop:
            if start < self._starts[at]:
                found.append((start, self._starts[at]))
            start = self._stops[at]
            at += 1
        if start < stop:
            found.append((start, stop))
        return found

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Take [start, stop) in; returns what of it is new."""
        new = self.gaps(start, stop)
        if new:
            self.total += sum(b - a for a, b in new)
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if first < last:
                start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
            self._starts[first:last] = [start]
            self._stops[first:last] = [stop]
        return new

    def intervals(self) -> list[tuple[int, int]]:
        """The whole set, in order."""
        return list(zip(self._starts, self._stops, strict=True))
