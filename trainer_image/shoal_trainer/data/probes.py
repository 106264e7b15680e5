"""Numbers of some samples, by which the workers of a job are compared: each must find the same at a position.

Numbers and no digest: two machines may round what a script computes of its data in different ways.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from shoal_trainer.data.batch import Batch, leaves

PROBES, PROBED = 16, 4096
"""The number of samples, and of the first values of each array of one."""


def places(size: int, reads: int) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) all over the data, so many or fewer, with `PROBES` samples together if there are as many."""
    each = min(size, PROBES // reads)
    starts = np.linspace(0, size - each, min(size, reads)).astype(int)
    yield from ((start, start + each) for start in sorted(set(starts.tolist())))


def probed(read: Callable[[], Iterable[Batch]]) -> tuple[float, ...]:
    """A number of each sample that is read. Another split, or another order, has other numbers.

    None of data that are others when they are read again, as those that a script augments: these no number would tell
    from another worker's.
    """
    from shoal_trainer.worker.keras_internals import without_seed

    first = _numbers(read())
    # A pipeline of TensorFlow that is made anew draws the same again, and each worker has a seed of its own.
    with without_seed():
        again = _numbers(read())
    return first if first == again else ()


def _numbers(batches: Iterable[Batch]) -> tuple[float, ...]:
    return tuple(
        sum(_number(column[row]) for column in columns)
        for batch in batches
        for columns in [[np.asarray(leaf) for leaf in leaves(batch.as_given())]]
        for row in range(batch.samples)
    )


def _number(row: Any) -> float:
    """A weighted sum of the values; of text a hash."""
    values = np.ravel(row)[:PROBED]
    if values.dtype.kind in "biuf":
        weights = np.cos(np.arange(values.size))
        return float(np.nan_to_num(values.astype(np.float64), posinf=1.0, neginf=-1.0) @ weights)
    return sum(zlib.crc32(str(value).encode()) / 2**32 for value in values if isinstance(value, str | bytes))
