"""Another order of the samples in every epoch, which any worker can continue at any position. Pure.

The positions of an epoch are divided into blocks, at other places in each epoch. The samples of a block change their
places in it, by a seed of the job, the epoch and the block. So batches have other members in every epoch, and to each
worker that is leased it a position means the same sample, whatever its batch size. A worker that begins within a block
reads the block from its beginning, unless it is the one that it has read last.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.data.rows import count, joined, taken
from shoal_trainer.errors import UserError

Read = Callable[[int, int | None], Iterable[Any]]
"""(start, stop) -> elements with the rows [start, stop) in their own order; `stop` None: to the end."""

Group = Callable[[Any, npt.NDArray[np.int64], int], npt.NDArray[np.int64]]
"""(element, order, seed) -> an order in which the rows that belong together are neighbours."""


@dataclass(frozen=True)
class Blocks:
    """Blocks of `size` positions, the first of which is shorter. `key`: the seed, the epoch, and the file if any."""

    size: int
    key: tuple[int, ...]

    @functools.cached_property
    def first(self) -> int:
        """The length of the first block."""
        return int(np.random.default_rng(self.key).integers(1, self.size + 1))

    def low(self, position: int) -> int:
        """The start of the block of a position."""
        first = self.first
        return 0 if position < first else first + (position - first) // self.size * self.size

    def end(self, position: int, limit: int | None = None) -> int:
        """The end of the block of a position, at most `limit`."""
        low = self.low(position)
        end = low + self.size if low else self.first
        return end if limit is None else min(end, limit)

    def order(self, low: int, rows: int) -> npt.NDArray[np.int64]:
        """The permutation of the `rows` rows of the block that starts at `low`."""
        return np.random.default_rng((*self.key, low)).permutation(rows)


class LastBlock:
    """The block in which the last read ended: who goes on within it does not read it again."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._rows: Any = None

    def keep(self, blocks: Blocks, low: int, rows: Any) -> None:
        """Keep the rows of the block that starts at `low`, in their own order."""
        self._key, self._rows = (*blocks.key, low), rows

    def take(self, blocks: Blocks, low: int) -> Any:
        """The rows of a block, None if it is another one; none is kept any more, so no two are in memory."""
        key, rows, self._key, self._rows = self._key, self._rows, (), None
        return rows if key == (*blocks.key, low) else None


def shuffled(
    read: Read,
    start: int,
    stop: int | None,
    blocks: Blocks,
    where: str,
    limit: int | None = None,
    group: Group | None = None,
    last: LastBlock | None = None,
) -> Iterator[Any]:
    """The rows at the positions [start, stop), in elements of one block each.

    `limit`: the end of the data, if it is known. `last`: of the last read, which is not repeated. Raises `UserError` if
    `read` gives more rows than it was asked for.
    """
    low = blocks.low(start)
    end = limit if stop is None else blocks.end(stop - 1, limit)

    def clipped(element: Any, low: int) -> Any:
        rows = count(element)
        order = blocks.order(low, rows)
        if group is not None:
            order = group(element, order, low)
        return taken(element, order[max(0, start - low) : None if stop is None else max(0, stop - low)])

    def done(whole: Any, low: int) -> Any:
        if last is not None and end is not None and low + count(whole) >= end:
            last.keep(blocks, low, whole)
        return clipped(whole, low)

    if last is not None and (known := last.take(blocks, low)) is not None:
        yield done(known, low)
        low += count(known)
        del known
        if end is not None and low >= end:
            return
    waiting: list[Any] = []
    missing = blocks.end(low, limit) - low
    begun = low
    for element in read(low, end):
        at, rows = 0, count(element)
        while at < rows:
            if end is not None and low >= end:
                raise UserError(
                    f"{where} yields more than {end - begun} samples. Yield exactly this many, unbatched."
                )
            part = taken(element, slice(at, at + missing))
            waiting.append(part)
            at += count(part)
            missing -= count(part)
            if not missing:
                whole, waiting = joined(waiting), []
                yield done(whole, low)
                low += count(whole)
                missing = blocks.end(low, limit) - low
    if waiting:
        rest = clipped(joined(waiting), low)
        if count(rest):
            yield rest
