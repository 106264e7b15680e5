"""Another order of the samples in every epoch, which any worker can continue at any position. Pure.

The positions of an epoch are divided into blocks, at other places in each epoch. The samples of a block change their
places in it, by a seed of the job, the epoch and the block. So batches have other members in every epoch, and to each
worker that is leased it a position means the same sample, whatever its batch size; a worker that begins within a block
reads the block from its beginning.
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


def shuffled(
    read: Read,
    start: int,
    stop: int | None,
    blocks: Blocks,
    where: str,
    limit: int | None = None,
    group: Group | None = None,
) -> Iterator[Any]:
    """The rows at the positions [start, stop), in elements of one block each.

    `limit`: the end of the data, if it is known. Raises `UserError` if `read` gives more rows than it was asked for.
    """
    low = blocks.low(start)
    end = limit if stop is None else blocks.end(stop - 1, limit)
    waiting: list[Any] = []
    missing = blocks.end(low, limit) - low
    begun = low

    def clipped(element: Any, low: int) -> Any:
        rows = count(element)
        order = blocks.order(low, rows)
        if group is not None:
            order = group(element, order, low)
        return taken(element, order[max(0, start - low) : None if stop is None else max(0, stop - low)])

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
                yield clipped(whole, low)
                low += count(whole)
                missing = blocks.end(low, limit) - low
    if waiting:
        last = clipped(joined(waiting), low)
        if count(last):
            yield last
