"""Data with a known number of samples that can be read from any range: arrays in memory, an index, a table."""

from __future__ import annotations

import dataclasses
import functools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeVar

import numpy as np

from shoal_trainer.data.batch import Batch, batches, leaves
from shoal_trainer.data.lengths import Lengths, checked, varying_by
from shoal_trainer.data.probes import places, probed
from shoal_trainer.data.read_errors import is_network_outage, summary
from shoal_trainer.data.rows import rebatched
from shoal_trainer.data.shuffle import Blocks, LastBlock, shuffled
from shoal_trainer.data.source import Extent, Part, Probes, Source
from shoal_trainer.errors import TrainerError, Unreachable, UserError

if TYPE_CHECKING:
    import tensorflow as tf

    from shoal_trainer.data.arrays import Arrays
    from shoal_trainer.data.downloads import Download
    from shoal_trainer.data.items import Items

T = TypeVar("T")

MAX_BLOCK = 1024
MAX_BLOCK_BYTES = 64 << 20
"""Limits of the number of samples that are shuffled together, if the user does not set it."""


class Ranges(Source):
    """Data with a known number of samples: any range of positions can be read."""

    size: int
    shuffle: int | None = None
    seed: int | None
    compared: ClassVar[tuple[int, int]] = 4, 4
    """At how many places a worker's samples are compared with the job's, and so many at each."""

    def describe(self) -> Extent:
        """The number of samples, and what their order depends on."""
        options = f"shuffle={self.shuffle}, lengths={list(self.lengths)}{self._order_name()}"
        return Extent(self.size, (), f"{type(self).__name__}({options})", self.seed)

    def _order_name(self) -> str:
        """Of single samples; see `order_name`."""
        return ""

    @property
    def threads(self) -> int:
        """So many may read the data at once: one, unless a script says that its code bears more."""
        return 1

    def probes(self) -> Probes:
        """See `Source`."""
        reads, rows = self.compared
        return probed(lambda part: self.read(part, rows), list(places(self.size, reads, rows)), self.threads)

    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:  # noqa: ARG002
        """Read a range of positions; see `Source.read`."""
        if part.stop is None:
            raise UserError(
                "The coordinator leases files, but the training data of this worker are indexed. Run the same code on "
                "every worker."
            )
        where = f"The data function, called for the samples {part.start}-{part.stop},"
        elements = self._elements(part.epoch, part.start, part.stop, batch_size)
        return batches(elements, batch_size, part.start, part.stop, where)

    def example(self, batch_size: int) -> Batch:
        """Read the first batch."""
        return next(self.read(Part(0, min(batch_size, self.size), None), batch_size))

    def placed(self, seed: int, worker: tuple[int, ...] = (0, 0)) -> Self:  # noqa: ARG002
        """These data in the order of `seed`, unless they have a seed of their own."""
        return dataclasses.replace(self, seed=seed) if self.seed is None else self  # type: ignore[type-var]

    @functools.cached_property
    def _last(self) -> LastBlock:
        return LastBlock()

    @abstractmethod
    def _elements(self, epoch: int | None, start: int, stop: int, batch_size: int) -> Iterator[Any]:
        """The rows at these positions of an epoch, in elements of at most `batch_size`."""


@dataclass(frozen=True)
class Indexed(Ranges):
    """Data of known size, read by a function of a range of sample positions.

    Shoal batches, prefetches and shuffles: it visits the ranges in a different seeded order in each epoch, and shuffles
    the samples of `shuffle` neighbouring positions.

    Args:
        size: The number of samples, at least 1.
        fn: A function `fn(start, stop)` that returns the `tf.data.Dataset` of the samples [start, stop): exactly
            `stop - start` single (unbatched) samples, always in the same order, because another worker may finish a
            range. A sample is `x`, `(x,)`, `(x, y)` or `(x, y, sample_weight)`, where each part is a dense tensor or
            a nested structure of them.
        shuffle: How many samples are read and shuffled together; 0 keeps the order of `fn` within a range. Default: as
            many as fit in 64 MB, at most 1024.
        lengths: Samples of different length are padded with zeros to the shortest of these lengths that holds the
            batch; those of like length are put into the same batches. Their tensors have the shape (None, …).
            Default: all samples have the same shape.
        seed: The seed of the order. Default: that of `Training`.

    Raises:
        UserError: `size` is less than 1, or an option has the wrong value.
    """

    size: int
    fn: Callable[[int, int], tf.data.Dataset]
    _: dataclasses.KW_ONLY
    shuffle: int | None = None
    lengths: Sequence[int] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise UserError(f"Indexed(size={self.size}): the data must have at least one sample.")
        check_shuffle(self.shuffle, "Indexed")
        object.__setattr__(self, "lengths", checked(self.lengths, "Indexed"))

    @staticmethod
    def from_arrays(x: Any, y: Any = None, sample_weight: Any = None, *, seed: int | None = None) -> Arrays:
        """Data that fits into memory.

        Single samples are shuffled, in a different seeded order in each epoch.

        Args:
            x: The inputs: an array of shape (N, …), or a nested structure (dict, tuple, list) of such arrays. Pandas
                objects, tensors and h5py data sets are converted to NumPy arrays. Floats are cast to
                `keras.config.floatx()`; other dtypes are kept.
            y: The targets, in the same forms; a pandas Series becomes shape (N, 1), as in `keras.Model.fit`.
                Default: none.
            sample_weight: One number per sample, shape (N,), or per token, shape (N, T), or a structure of such arrays
                with one per output. Default: none.
            seed: The seed of the order. Default: that of `Training`.

        Returns:
            `Arrays`, for `Training(data=…)` or `Training(validation=…)`.

        Raises:
            UserError: The arrays are empty, ragged, sparse or of different lengths N.
        """
        from shoal_trainer.data.arrays import Arrays

        return Arrays(x, y, sample_weight, seed)

    @staticmethod
    def from_items(
        items: Any,
        parse: Callable[[Any], Any] | None = None,
        *,
        lengths: Sequence[int] = (),
        seed: int | None = None,
    ) -> Items:
        """Data with `len(items)` and `items[i]`: a Hugging Face dataset, a Grain source, a PyTorch dataset, a list.

        Single samples are shuffled, in a different seeded order in each epoch.

        Args:
            items: The data; `items[i]` is always the same. With a method `__getitems__(positions)`, it is used to get
                many at once.
            parse: A function that maps an item to a sample: `x`, `(x, y)` or `(x, y, sample_weight)`. Lists in a sample
                are arrays. Default: an item is a sample.
            lengths: As in `Indexed`: of the arrays those whose length differs among 64 samples of all the data.
            seed: The seed of the order. Default: that of `Training`.

        Returns:
            `Items`, for `Training(data=…)` or `Training(validation=…)`.

        Raises:
            UserError: There are no items, or they do not end.
        """
        from shoal_trainer.data.items import Items

        return Items(items, parse, tuple(lengths), seed)

    def _elements(self, epoch: int | None, start: int, stop: int, batch_size: int) -> Iterator[Any]:
        name = f"samples {start}-{stop}"
        lengths = connected(lambda: self._lengths, name)

        def read(low: int, high: int | None) -> Iterator[Any]:
            dataset = connected(lambda: self.fn(low, self.size if high is None else high), name)
            require_dataset(dataset, "Indexed(fn=…)")
            return reached(batched(dataset, batch_size, lengths), name)

        where = f"The data function, called for the {name},"
        block = 0 if epoch is None else connected(lambda: self._shuffled, name)
        if block > 1:
            blocks = Blocks(block, (self.seed or 0, epoch or 0))
            group = lengths.group if lengths else None
            rows = shuffled(read, start, stop, blocks, where, self.size, group, self._last)
            rows = rebatched(rows, batch_size)
        else:
            rows = read(start, stop)
        return rows if lengths is None else lengths.cut(rows)

    @functools.cached_property
    def _spec(self) -> Any:
        dataset = self.fn(0, 1)
        require_dataset(dataset, "Indexed(fn=…)")
        return dataset.element_spec

    @functools.cached_property
    def _lengths(self) -> Lengths | None:
        return Lengths(tuple(self.lengths), varying_by(self._spec)) if self.lengths else None

    @property
    def block(self) -> int:
        """See `Source`."""
        return connected(lambda: self._shuffled, "the training data")

    @functools.cached_property
    def _shuffled(self) -> int:
        return block_of(self._spec, self.lengths) if self.shuffle is None else self.shuffle


def check_shuffle(shuffle: int | None, where: str) -> None:
    """Raise `UserError` for a number of samples that cannot be shuffled together."""
    if shuffle is not None and shuffle < 0:
        raise UserError(f"{where}(shuffle={shuffle}) must be a number of samples, or 0 to keep their order.")


def block_of(spec: Any, lengths: Sequence[int] = ()) -> int:
    """The number of samples to shuffle together, by the `element_spec` of a data set: the same in each worker."""
    longest = max(lengths, default=256)
    size = sum(
        int(np.prod([longest if axis is None else axis for axis in leaf.shape], dtype=np.int64))
        * (leaf.dtype.size or 64)
        for leaf in leaves(spec)
        if leaf.shape.rank is not None
    )
    return max(1, min(MAX_BLOCK, MAX_BLOCK_BYTES // max(1, size)))


def batched(dataset: Any, batch_size: int, lengths: Lengths | None) -> Any:
    """A data set of single samples in batches, read ahead; with `lengths`, as `Lengths` needs them."""
    if lengths is not None:
        return lengths.dataset(dataset, batch_size).prefetch(2)
    return dataset.batch(batch_size, num_parallel_calls=2).prefetch(2)


def connected(call: Callable[[], T], name: str) -> T:
    """Call the user's function; a network error in it becomes `Unreachable`."""
    try:
        return call()
    except TrainerError:
        raise
    except Exception as error:
        if is_network_outage(error):
            raise Unreachable(f"{name}: {summary(error)}") from error
        raise


def reached(dataset: Any, name: str) -> Iterator[Any]:
    """Iterate over the user's data set; a network error in it becomes `Unreachable`."""
    rows = iter(dataset)
    while True:
        try:
            row = connected(lambda: next(rows), name)
        except StopIteration:
            return
        yield row


def require_dataset(dataset: Any, where: str) -> None:
    """Raise `UserError` for anything that is not a `tf.data.Dataset` of dense samples."""
    if not hasattr(dataset, "element_spec"):
        raise UserError(f"{where} must return a tf.data.Dataset; it returned {type(dataset).__name__}.")
    for spec in leaves(dataset.element_spec):
        if type(spec).__name__ in {"RaggedTensorSpec", "SparseTensorSpec"}:
            raise UserError(
                f"{where} yields a {type(spec).__name__.removesuffix('Spec')}. Yield dense tensors, padded to one "
                "length: x.to_tensor() or tf.sparse.to_dense(x)."
            )


def require_end(dataset: Any, where: str) -> None:
    """Raise `UserError` for a data set without end. TensorFlow takes some interleaved ones for endless that do end."""
    if int(dataset.cardinality()) == -1:  # tf.data.INFINITE_CARDINALITY
        raise UserError(
            f"{where} returns a data set that never ends. Remove .repeat(): Shoal reads the data in each epoch. If it "
            "does end, add .take(n), where n is at least its number of samples."
        )
