"""A set of integers, stored as sorted, disjoint intervals. Pure."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable


class Positions:
    """A set of non-negative integers. Intervals are half-open, [start, stop)."""

    def __init__(self, intervals: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        self.total = 0
        self._shared = False
        """Whether `share` has given the lists away, so that they no longer change."""
        for start, stop in intervals:
            self.add(start, stop)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Positions):
            return NotImplemented
        return self._starts == other._starts and self._stops == other._stops

    __hash__ = None  # type: ignore[assignment]  # it changes

    def gaps(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of [start, stop) that are not in the set."""
        found = []
        index = bisect_right(self._stops, start)
        while index < len(self._starts) and self._starts[index] < stop:
            if start < self._starts[index]:
                found.append((start, self._starts[index]))
            start = self._stops[index]
            index += 1
        if start < stop:
            found.append((start, stop))
        return found

    def add(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Add [start, stop); returns the parts that were not in the set before."""
        new = self.gaps(start, stop)
        if new:
            self.total += sum(b - a for a, b in new)
            first, last = bisect_left(self._stops, start), bisect_right(self._starts, stop)
            if first < last:
                start, stop = min(start, self._starts[first]), max(stop, self._stops[last - 1])
            if self._shared:
                self._starts, self._stops, self._shared = self._starts[:], self._stops[:], False
            self._starts[first:last] = [start]
            self._stops[first:last] = [stop]
        return new

    @staticmethod
    def share(sets: Iterable[Positions]) -> tuple[list[list[int]], list[list[int]]]:
        """The starts and stops of many sets, which keep what they are now. Copies nothing until a set changes."""
        sets = list(sets)
        for one in sets:
            one._shared = True
        return [one._starts for one in sets], [one._stops for one in sets]

    def intervals(self) -> list[tuple[int, int]]:
        """The whole set, in order."""
        return list(zip(self._starts, self._stops, strict=True))
