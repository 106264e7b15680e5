"""Data that are got by index: single items (Hugging Face, Grain, PyTorch), or batches (`keras.utils.PyDataset`)."""

from __future__ import annotations

import contextlib
import functools
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shoal_trainer.data.arrays import as_floatx
from shoal_trainer.data.batch import as_tuple, leaves, map_leaves, named_in
from shoal_trainer.data.indexed import MAX_BLOCK, MAX_BLOCK_BYTES, Ranges, connected
from shoal_trainer.data.lengths import Lengths, checked, varying_in
from shoal_trainer.data.order import order_name, samples_at
from shoal_trainer.data.rows import alike, columns, count, rebatched, stacked, taken
from shoal_trainer.data.shuffle import Blocks, shuffled
from shoal_trainer.errors import UserError

LOOKED_AT = 64
"""Items from all over the data, which show the arrays that vary in length."""
RETRIES = 2
"""Of a batch whose reading raises a SystemError."""


@dataclass(frozen=True)
class Items(Ranges):
    """Single samples by index, made by `Indexed.from_items`."""

    items: Any
    parse: Callable[[Any], Any] | None = None
    lengths: tuple[int, ...] = ()
    seed: int | None = None
    size: int = field(init=False)
    compared = 8, 1

    def __post_init__(self) -> None:
        size = len(self.items)
        if size < 1:
            raise UserError("The data must have at least one sample; the data set is empty.")
        if size >= sys.maxsize >> 1:  # as Grain tells that a data set repeats
            raise UserError(
                "The data set never ends. Leave out repeat(): Shoal reads the data in each epoch."
            )
        object.__setattr__(self, "size", size)
        object.__setattr__(self, "lengths", checked(self.lengths, "Indexed.from_items"))

    @property
    def block(self) -> int:
        """See `Source`."""
        return MAX_BLOCK if self.lengths else 0

    def _order_name(self) -> str:
        return order_name(self.size)

    def _elements(self, epoch: int | None, start: int, stop: int, batch_size: int) -> Iterator[Any]:
        def read(low: int, high: int | None) -> Iterator[Any]:
            end = self.size if high is None else high
            for begin in range(low, end, batch_size):
                rows = samples_at(begin, min(begin + batch_size, end), self.size, self.seed or 0, epoch)
                samples = self._samples(rows.tolist())
                yield _stacked(samples) if self._lengths is None else self._lengths.stacked(samples)

        if self._lengths is None:
            return read(start, stop)
        if epoch is None:
            return self._lengths.cut(read(start, stop))
        blocks = Blocks(self.block, (self.seed or 0, epoch))
        group = self._lengths.group
        rows = shuffled(read, start, stop, blocks, "The data set", self.size, group, self._last)
        return self._lengths.cut(rebatched(rows, batch_size))

    @functools.cached_property
    def _lengths(self) -> Lengths | None:
        if not self.lengths:
            return None
        rows = np.linspace(0, self.size - 1, min(LOOKED_AT, self.size)).astype(int)
        return Lengths(self.lengths, varying_in(self._samples(rows.tolist())))

    def _samples(self, rows: list[int]) -> list[Any]:
        def read() -> list[Any]:
            return [_as_arrays(item if self.parse is None else self.parse(item)) for item in self._get(rows)]

        return connected(read, f"samples {rows[0]}, …")

    def _get(self, rows: list[int]) -> Sequence[Any]:
        many = getattr(self.items, "__getitems__", None)
        found: Sequence[Any] = [self.items[row] for row in rows] if many is None else many(rows)
        return found


@dataclass(frozen=True, eq=False)
class Batches(Ranges):
    """A finite `keras.utils.PyDataset`: batches by index, all of one size but the last.

    Its `on_epoch_begin` and `on_epoch_end` are not called, because each process would change its own copy.
    """

    dataset: Any
    seed: int | None = None
    remark = "a PyDataset is read by index, and Shoal shuffles: its on_epoch_begin() and on_epoch_end() are not called"

    def __post_init__(self) -> None:
        if self.dataset.num_batches < 1:
            raise UserError("The data must have at least one batch; the PyDataset is empty.")

    def placed(self, seed: int, worker: tuple[int, ...] = (0, 0)) -> Batches:
        """See `Source`. What has been read of the data to count them is not read again."""
        placed = super().placed(seed, worker)
        placed.__dict__.update(
            {name: self.__dict__[name] for name in ("size", "_first") if name in self.__dict__}
        )
        return placed

    @functools.cached_property
    def size(self) -> int:  # type: ignore[override]
        """The number of samples. Reads three batches, so it isn't known before it is asked for."""
        last = int(self.dataset.num_batches) - 1
        if last > 1:
            self._check(last // 2, self._batch(last // 2), self._each)
        if not last:
            return self._each
        element = self._batch(last)
        self._check(last, element, count(element))
        return self._each * last + count(element)

    @property
    def threads(self) -> int:
        """See `Ranges`."""
        return max(1, int(self.dataset.workers))

    @functools.cached_property
    def _first(self) -> Any:
        found = _as_batch(connected(lambda: self._read(0), "the batch 0"))
        if not count(found):
            raise UserError(
                "The first batch of the PyDataset has no rows, so nobody knows how many the others have. Leave empty "
                "batches out."
            )
        return found

    @property
    def batch_size(self) -> int:
        """See `Source`."""
        return self._each

    @property
    def _each(self) -> int:
        return count(self._first)

    def _batch(self, index: int) -> Any:
        return _as_batch(connected(lambda: self._read(index), f"the batch {index}"))

    def _check(self, index: int, element: Any, rows: int) -> None:
        if count(element) != rows or not alike(element, self._first):
            raise UserError(
                f"The batch {index} of the PyDataset has {_shapes(element)}, the first one {_shapes(self._first)}. All "
                "batches but the last must be alike, because Shoal finds samples by their number. Pad them, or pass "
                "Stream(data, samples=N), which takes batches as they are; its lengths=[…] limits their shapes."
            )

    def _read(self, index: int) -> Any:
        # CPython counts the depth of `ast.literal_eval` for all threads together, so threads that read `.npz` files at
        # once may raise a SystemError (python/cpython#106905).
        for _ in range(RETRIES):
            with contextlib.suppress(SystemError):
                return self.dataset[index]
        return self.dataset[index]

    @property
    def block(self) -> int:
        """See `Source`."""
        row = sum(np.asarray(leaf).nbytes for leaf in leaves(self._first)) // self._each
        return max(self._each, min(MAX_BLOCK, MAX_BLOCK_BYTES // max(1, row)))

    def _elements(self, epoch: int | None, start: int, stop: int, batch_size: int) -> Iterator[Any]:
        each = self._each

        def get(index: int) -> Any:
            element, wanted = self._batch(index), min(each, self.size - index * each)
            self._check(index, element, wanted)
            return element

        def read(low: int, high: int | None) -> Iterator[Any]:
            end = self.size if high is None else high
            numbers = range(low // each, -(-end // each))
            for index, element in zip(numbers, _ahead(get, numbers, int(self.dataset.workers)), strict=True):
                begin = index * each
                yield taken(element, slice(max(0, low - begin), end - begin))

        if epoch is None:
            return rebatched(read(start, stop), batch_size)
        blocks = Blocks(self.block, (self.seed or 0, epoch))
        rows = shuffled(read, start, stop, blocks, "The PyDataset", self.size, last=self._last)
        return rebatched(rows, batch_size)


def _ahead(get: Callable[[int], Any], numbers: Iterable[int], workers: int) -> Iterator[Any]:
    """The results of `get`, in order, computed by so many threads ahead of the reader."""
    if workers <= 1:
        yield from map(get, numbers)
        return
    waiting: deque[Any] = deque()
    with ThreadPoolExecutor(workers, thread_name_prefix="data") as pool:
        try:
            for number in numbers:
                waiting.append(pool.submit(get, number))
                if len(waiting) > workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _as_arrays(structure: Any) -> Any:
    """A sample with arrays for leaves: lists are arrays, tuples and dicts are structures."""
    if isinstance(structure, dict):
        return {key: _as_arrays(part) for key, part in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*map(_as_arrays, structure))
    if isinstance(structure, tuple):
        return tuple(map(_as_arrays, structure))
    if structure is None:
        return None
    found = np.asarray(structure)
    if found.dtype.kind == "S" and not isinstance(structure, np.ndarray):  # which loses zeros at the end
        return np.asarray(structure, object)
    return as_floatx(found)


def _as_batch(structure: Any) -> Any:
    return map_leaves(lambda leaf: as_floatx(np.asarray(leaf)), as_tuple(structure))


def _stacked(samples: Sequence[Any]) -> Any:
    """Single samples as one element."""
    found, advice = columns(samples), "Pad them, or pass Indexed.from_items(…, lengths=[…])."
    return map_leaves(lambda _: stacked(next(found), advice), samples[0])


def _shapes(element: Any) -> str:
    shapes = ", ".join(str(np.shape(leaf)) for leaf in leaves(element))
    return f"{shapes} ({named_in(element)})"
