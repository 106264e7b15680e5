"""Numbers of some samples, by which the workers of a job are compared: each must find the same at a position.

Numbers and no digest: two machines may round what a script computes of its data in different ways.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from shoal_trainer.data.batch import Batch, leaves
from shoal_trainer.data.source import Part, Probes

PROBED = 4096
"""The number of the first values of each array of a sample that count."""
AGAIN = 4
"""So many places are read a second time."""


def places(size: int, reads: int, rows: int) -> Iterator[Part]:
    """Ranges of so many rows all over the data, in their own order; fewer of either where there are not as many."""
    rows = min(size, rows)
    starts = np.linspace(0, size - rows, min(size, reads)).astype(int)
    yield from (Part(start, start + rows, None) for start in sorted(set(starts.tolist())))


def probes_of(columns: Sequence[Any]) -> Iterator[tuple[float, float]]:
    """The number of each row of these arrays, and its scale."""
    for row in range(len(columns[0])):
        numbers, scales = zip(*(_number(column[row]) for column in columns), strict=True)
        yield sum(numbers), math.hypot(*scales)


def probed(read: Callable[[Part], Iterable[Batch]], parts: Sequence[Part], threads: int) -> Probes:
    """Of the samples in these parts.

    None of data that are others when they are read again, as those that a script augments: these no number would tell
    from another worker's.
    """
    from shoal_trainer.worker.keras_internals import without_seed

    def found(part: Part) -> list[tuple[float, float]]:
        samples = (leaves(batch.as_given()) for batch in read(part))
        return [probe for sample in samples for probe in probes_of([np.asarray(leaf) for leaf in sample])]

    with ThreadPoolExecutor(threads, thread_name_prefix="probes") as pool:
        first = dict(zip(parts, pool.map(found, parts), strict=True))
        few = parts[:: -(-len(parts) // AGAIN)]
        # A pipeline of TensorFlow that is made anew draws the same again, and each worker has a seed of its own.
        with without_seed():
            again = list(pool.map(found, few))
    if [first[part] for part in few] != again:
        return Probes()
    return Probes(*zip(*(probe for each in first.values() for probe in each), strict=True))


def _number(row: Any) -> tuple[float, float]:
    """A weighted sum of the values, and its scale; of text a hash."""
    values = np.ravel(row)[:PROBED]
    if values.dtype.kind in "biuf":
        weights = np.cos(np.arange(values.size))
        values = np.nan_to_num(values.astype(np.float64), posinf=1.0, neginf=-1.0)
        return float(values @ weights), float(np.linalg.norm(values * weights))
    hashes = [zlib.crc32(str(value).encode()) / 2**32 for value in values if isinstance(value, str | bytes)]
    return sum(hashes), math.hypot(*hashes)
