"""Data that can only be read from their beginning: a `tf.data.Dataset`, a generator, an endless `PyDataset`.

No range of them can be leased, so each worker reads its own stream again and again, and a lease says only how many
samples to take from it. An epoch is a number of samples. Workers begin at different places; else they would train the
same samples at the same time.
"""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from shoal_trainer.data.batch import Batch, as_tuple, batches, fill, leaves, map_leaves
from shoal_trainer.data.indexed import connected, reached, require_dataset
from shoal_trainer.data.lengths import checked, fitting, padding, varying_in
from shoal_trainer.data.rows import alike, columns, count, joined, rebatched, taken
from shoal_trainer.data.source import UNPLACED, Epochs, Extent, Part, Source
from shoal_trainer.errors import UserError

if TYPE_CHECKING:
    from shoal_trainer.data.downloads import Download

log = logging.getLogger(__name__)

LOOKED_AT = 16
"""The first batches, which show the arrays that vary in length."""
SKIP_SECONDS = 20.0
"""How long a worker skips samples at most to reach its own place."""
PLACES = 1000
"""With fewer batches of data, workers would meet where they begin with a whole one."""
MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
OF_SAMPLES = ("Unbatch", "TFRecord", "TextLine", "FixedLengthRecord", "Csv")
BATCHED = ("Batch", "Rebatch")
TELLING = (*OF_SAMPLES, *BATCHED, "FlatMap", "Interleave", "Window")
"""Words in the names of TensorFlow's classes of data sets: what made one tells whether it has batches."""
GOLDEN, SILVER = (math.sqrt(5) - 1) / 2, math.sqrt(2) - 1
"""Irrational shares, whose multiples spread evenly."""


@dataclass(frozen=True)
class Stream(Source):
    """Data without a range that could be leased: each worker reads them from a place of its own.

    An epoch is `samples` samples of all workers together. They are not each trained exactly once in it: how often a
    sample occurs depends on chance, as with `ParameterServerStrategy`. Prefer `Indexed` or `Files` where exact epochs
    matter.

    Args:
        data: What yields **batches**, as for Keras' `fit`: a `tf.data.Dataset`, an iterable that can be iterated again,
            an endless `PyDataset`, or a function that returns one of these or a generator. A function with an
            argument that is called `seed`, or has no default, gets a number in it: it follows from the seed of
            `Training`, and is another one on each worker, in each pass over the data and in a run that continues this
            one; then no worker skips samples. Data that end are repeated. A `tf.data.Dataset` may also yield single
            samples.
        samples: The number of samples in an epoch. Default: those of a `tf.data.Dataset` whose length is known; as
            validation, all of any data that end.
        lengths: Batches are padded with zeros, along the axis after that of the batch, to the shortest of these lengths
            that holds them; of their arrays those whose length differs in the first 16 batches. Without it, each new
            shape of a batch is compiled.

    Raises:
        UserError: The number of samples is unknown, or an option has the wrong value.
    """

    data: Any
    samples: int | None = None
    lengths: Sequence[int] = ()
    _rows: _Rows | None = field(init=False, repr=False, default=None)
    _worker: tuple[int, ...] = field(init=False, repr=False, default=(0, 0))
    _seed: int = field(init=False, repr=False, default=0)
    _passes: itertools.count[int] = field(init=False, repr=False, default_factory=itertools.count)
    _read: int = field(init=False, repr=False, default=0)
    """How many samples this worker has taken before its last outage."""
    _begins: int | None = field(init=False, repr=False, default=None)
    """The first epoch of which this worker reads."""
    _length: int = field(init=False, repr=False, default=0)
    """The samples in a pass, once one has shown them."""
    _endless: bool = field(init=False, repr=False, default=False)
    """Whether a function was seen to return a data set without an end."""
    _cut: bool = field(init=False, repr=False, default=False)
    """Whether an evaluation was told to read a part of the data."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", checked(self.lengths, "Stream"))
        if _is_dataset(self.data):
            require_dataset(self.data, "The data set")
        if self.samples is not None:
            if self.samples < 1:
                raise UserError(f"Stream(samples={self.samples}): an epoch must have at least one sample.")
        elif (known := self._cardinality) == 0:
            raise UserError(EMPTY)
        elif known == -1:
            raise self._uncountable(", because it never ends")

    @property
    def remark(self) -> str:  # type: ignore[override]
        """See `Source`."""
        rounded = ", its batches times the rows of the first two" if self._counted.rounded else ""
        return (
            f"{_name(self.data)} cannot be read from any position, so each worker reads it from a place of its own: an "
            f"epoch is {self._counted.size:,} samples{rounded}, {UNPLACED}"
        )

    def describe(self) -> Extent:
        """The number of samples in an epoch."""
        return Extent(self._counted.size)

    def placed(self, seed: int, worker: tuple[int, ...] = (0, 0)) -> Stream:
        """The stream of one worker."""
        stream = copy.copy(self)
        stream._set(_rows=None, _worker=worker, _seed=seed, _passes=itertools.count(), _read=0, _begins=None)
        return stream

    def _set(self, **fields: Any) -> None:
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def example(self, batch_size: int) -> Batch:
        """The first batch of an iteration of its own."""
        if self.batch_size is not None:
            return fill(next(self._formed(iter([self._head.first]), batch_size)), batch_size, batch_size)
        batch = next(self.whole(batch_size), None)
        if batch is None:
            raise UserError(EMPTY)
        return batch

    @property
    def batch_size(self) -> int | None:
        """See `Source`."""
        if _is_dataset(self.data) and not _is_batched(self.data):
            return None
        return count(self._head.first) if self._head.batched else None

    @functools.cached_property
    def _head(self) -> _Head:
        """Reads an iteration of its own."""
        data = connected(lambda: self._made(0), "the data")
        batches = filter(count, _batches_of(data, 1))
        found = list(itertools.islice(batches, LOOKED_AT if self.lengths else 2))
        if not found:
            raise UserError(EMPTY)
        varies = varying_in(found, axis=1) if self.lengths else ()
        batched = not _is_dataset(data) or _is_batched(data)
        return _Head(found[0], max(map(count, found[:2])), varies, batched)

    def read(self, part: Part, batch_size: int, download: Download | None = None) -> Iterator[Batch]:  # noqa: ARG002
        """Take as many samples as the part has from this worker's stream; see `Source.read`."""
        if part.stop is None:
            raise UserError(
                "The coordinator leases files, but the training data of this worker are a stream. Run the same code on "
                "every worker."
            )
        if self._begins is None:
            self._set(_begins=part.epoch)
        rows = self._taken(part.stop - part.start, batch_size)
        return batches(rows, batch_size, part.start, part.stop, "The data")

    def epochs(self, batch_size: int) -> Epochs:
        """See `Source`. One pass as Keras makes it, unless the user says how many samples make an epoch."""
        if self.samples is not None:
            numbers, size = itertools.count(), self.samples
            steps = -(-size // batch_size) if self._has_one_shape else None
            return Epochs(lambda: self.read(Part(0, size, next(numbers)), batch_size), steps)
        own, known = self.batch_size, self._cardinality
        if own == batch_size and not self.lengths:
            return Epochs(self._as_they_are, known if _has_full_batches(self.data) else None)
        return Epochs(lambda: self.whole(batch_size), -(-known // batch_size) if own is None else None)

    @property
    def _has_one_shape(self) -> bool:
        """Whether all rows are known to have one shape, so that they can be joined; nobody knows of a generator."""
        if self.lengths or not _is_dataset(self.data):
            return False
        shapes = [leaf.shape for leaf in leaves(self.data.element_spec)]
        batched = _is_batched(self.data)
        return all(shape.rank is not None and None not in list(shape)[batched:] for shape in shapes)

    def _as_they_are(self) -> Iterator[Batch]:
        """The batches of a pass that have a row, neither cut nor joined."""
        end = 0
        for element in filter(count, _batches_of(connected(lambda: self._made(0), "the data"), 1)):
            rows = count(element)
            end += rows
            yield fill(element, rows, end)

    def whole(self, batch_size: int) -> Iterator[Batch]:
        """One pass over the data from their beginning, to `samples` if that was given."""
        end, stop, elements = 0, self.samples, self._elements(batch_size)
        for element in elements:
            rows = element if stop is None else taken(element, slice(0, stop - end))
            end += count(rows)
            yield fill(rows, batch_size, end)
            if end == stop:
                if not self._cut and _is_dataset(self.data) and self._cardinality == -2:
                    self._set(_cut=count(rows) < count(element) or any(map(count, elements)))
                    if self._cut:
                        log.warning("an evaluation reads samples=%d, and the data set has more", stop)
                return

    def _taken(self, samples: int, batch_size: int) -> Iterator[Any]:
        while samples > 0:
            element = self._next(min(samples, batch_size), batch_size)
            samples -= count(element)
            yield element

    def _next(self, samples: int, batch_size: int) -> Any:
        """The next of this worker's rows. After an error they are begun anew: an iterator that raised has ended."""
        if self._rows is None:
            self._set(_rows=_Rows(self._repeated(batch_size)))
        rows = self._rows
        assert rows is not None
        try:
            if not rows.taken:
                self._go_to_own_place(rows, batch_size)
            return rows.take(samples)
        except BaseException:
            self._set(_rows=None, _read=self._read + rows.taken)
            raise

    def _go_to_own_place(self, rows: _Rows, batch_size: int) -> None:
        """Skip to where this worker begins, and what it has read before an outage, or the run that it continues."""
        if self._seeded is not None:
            return
        length, (slot, incarnation, *continued) = self._in_a_pass, self._worker
        place = int((slot * GOLDEN + incarnation * SILVER) % 1 * length)
        if length >= PLACES * batch_size:  # between two batches, whose rows need not be joined
            place -= place % batch_size
        own, before = place + self._read, (self._begins or 0) * self._counted.size if continued else 0
        if self._endless or self._cardinality == -1:  # such data most often repeat after an epoch
            own, before = own % length, 0 if self._read else before
        missing = own + before
        if known := self._length or (length if self._cardinality > 0 else 0):
            missing %= known
        # Each in a time of its own: workers are apart also where that of the first is over.
        for left in (own, 0):
            started = time.monotonic()
            while missing > left and time.monotonic() - started < SKIP_SECONDS:
                missing -= count(rows.skip(min(missing, batch_size)))
                if self._length:  # a pass has just ended
                    missing %= self._length
            missing = min(missing, left)

    def _repeated(self, batch_size: int) -> Iterator[Any]:
        for number in self._passes:
            # A PyDataset may order its batches anew: it is this worker's own, unlike the ranges of `Batches`.
            getattr(self.data, "on_epoch_begin", lambda: None)()
            length = 0
            for element in self._elements(batch_size, number):
                length += count(element)
                yield element
            if not length:
                raise UserError(f"{_name(self.data)} ends at once. {ONCE}")
            self._set(_length=length)
            getattr(self.data, "on_epoch_end", lambda: None)()

    def _elements(self, batch_size: int, number: int = 0) -> Iterator[Any]:
        """A pass over the data, in elements of at most `batch_size` rows. `number`: which one it is."""
        data = connected(lambda: self._made(number), "the data")
        if _is_dataset(data) and int(data.cardinality()) == -1:
            self._set(_endless=True)
        return self._formed(_batches_of(data, batch_size), batch_size)

    def _formed(self, elements: Iterator[Any], batch_size: int) -> Iterator[Any]:
        """The batches of the user in elements of at most `batch_size` rows."""
        return rebatched(map(self._padded, elements) if self.lengths else elements, batch_size)

    def _made(self, number: int) -> Any:
        if _is_dataset(self.data) or not callable(self.data):
            return self.data
        if (parameter := self._seeded) is None:
            return self.data()
        seed = int(np.random.SeedSequence((self._seed, *self._worker, number)).generate_state(1)[0])
        by_name = parameter.kind is not inspect.Parameter.POSITIONAL_ONLY
        return self.data(**{parameter.name: seed}) if by_name else self.data(seed)

    @functools.cached_property
    def _seeded(self) -> inspect.Parameter | None:
        """Where the data are a function of a seed, the parameter that takes it."""
        if _is_dataset(self.data) or not callable(self.data):
            return None
        parameters = inspect.signature(self.data).parameters
        wanting = (
            each for each in parameters.values() if each.kind not in MANY and each.default is each.empty
        )
        return parameters.get("seed") or next(wanting, None)

    def check_countable(self) -> None:
        """See `Source`."""
        if self.samples is None and self._cardinality < 0:
            raise self._uncountable()

    def _uncountable(self, why: str = "") -> UserError:
        return UserError(
            f"It is unknown how many samples {_name(self.data)} has{why}. Say how many make an epoch, or an "
            "evaluation: Stream(data, samples=N)."
        )

    @property
    def _cardinality(self) -> int:
        """As TensorFlow counts: -1 of data that never end, -2 of data whose end only reading finds."""
        if _is_dataset(self.data):
            return int(self.data.cardinality())
        return -1 if getattr(self.data, "num_batches", 0) is None else -2  # of a PyDataset

    @functools.cached_property
    def _counted(self) -> _Counted:
        """Not before it is asked for: it may run the user's pipeline, which validation data need not."""
        if self.samples is not None:
            return _Counted(self.samples)
        self.check_countable()
        known = self._cardinality
        rounded = (
            known > 1
            and _is_batched(self.data)
            and next(iter(leaves(self.data.element_spec))).shape[0] is None
        )
        return _Counted(self._in_a_pass, rounded)

    @functools.cached_property
    def _in_a_pass(self) -> int:
        """The samples in a pass over the data, or nearly so; those of an epoch, where nobody can say."""
        known = self._cardinality
        if known < 1:
            return self._counted.size
        return known * self._head.rows if _is_batched(self.data) else known

    def _padded(self, element: Any) -> Any:
        varies = self._head.varies
        columns((self._head.first, element))  # raises if it has others
        longest = max(leaf.shape[1] for leaf, each in zip(leaves(element), varies, strict=True) if each)
        width, flags = fitting(self.lengths, longest, "A batch"), iter(varies)

        def pad(leaf: Any) -> Any:
            missing = width - leaf.shape[1] if next(flags) else 0
            if not missing:
                return leaf
            shape = (len(leaf), missing, *leaf.shape[2:])
            return np.concatenate([leaf, np.full(shape, padding(leaf.dtype), leaf.dtype)], axis=1)

        return map_leaves(pad, element)


EMPTY = "The data are empty."
ONCE = (
    "A generator can be read only once: pass a function that returns a new one, Stream(function, samples=N)."
)


class _Head(NamedTuple):
    """Of the first batches of the user that have a sample: the first one, and the most rows of two.

    `varies`: of each array, whether it is padded to one of `lengths`, if there are some. `batched`: False of single
    samples, of which these are batches of one.
    """

    first: Any
    rows: int
    varies: Sequence[bool]
    batched: bool


class _Counted(NamedTuple):
    """The samples of an epoch.

    `rounded`: the last batch may have fewer rows than was counted; only a pass over the data would tell.
    """

    size: int
    rounded: bool = False


class _Rows:
    """The rows of an endless iterator of elements, to be taken a few at a time."""

    def __init__(self, elements: Iterator[Any]) -> None:
        self._elements = elements
        self._rest: Any = None
        self.taken = 0

    def take(self, rows: int) -> Any:
        """The next rows: so many, or fewer where their shapes change."""
        parts = [self.skip(rows)]
        while (missing := rows - sum(map(count, parts))) and alike(parts[0], self._upcoming()):
            parts.append(self.skip(missing))
        self.taken += rows - missing
        return joined(parts)

    def skip(self, rows: int) -> Any:
        """The next rows, at most so many, which do not count as taken."""
        element = self._upcoming()
        self._rest = None
        if count(element) > rows:
            self._rest = taken(element, slice(rows, None))
            element = taken(element, slice(0, rows))
        return element

    def _upcoming(self) -> Any:
        if self._rest is None:
            self._rest = next(self._elements)
        return self._rest


def _batches_of(data: Any, batch_size: int) -> Iterator[Any]:
    """The batches of the user, of a data set read ahead; of single samples those of `batch_size`."""
    if _is_dataset(data):
        if not _is_batched(data):
            data = data.batch(batch_size, num_parallel_calls=2)
        data = data.prefetch(2)
        require_dataset(data, "The data set")
    return map(_as_arrays, reached(data, "the data"))


def _is_dataset(data: Any) -> bool:
    """Whether it is a `tf.data.Dataset`. An iterator over one has an `element_spec`, too."""
    return hasattr(data, "element_spec") and hasattr(data, "prefetch")


def _is_batched(dataset: Any) -> bool:
    """Whether a data set yields batches: what it is made of says so, or its tensors all have the same axis 0.

    Single samples rarely have that, but those of arrays of which an image is its own label.
    """
    made = _maker(dataset)
    if _is_one_of(made, OF_SAMPLES) or (_is_one_of(made, ("TensorSlice",)) and _alike(made)):
        return False
    return _alike(dataset, unknown=_is_one_of(made, BATCHED))


def _has_full_batches(dataset: Any) -> bool:
    """Whether each batch of a data set is known to have a row."""
    sizes = {leaf.shape[0] for leaf in leaves(dataset.element_spec) if leaf.shape.rank}
    return None not in sizes or _is_one_of(_maker(dataset, (*TELLING, "Map")), BATCHED)


def _maker(dataset: Any, telling: Sequence[str] = TELLING) -> Any:
    """The data set that made the elements of this one, as far as it is known: the last one that is `telling`."""
    from shoal_trainer.worker.keras_internals import made_of

    made = dataset
    while not _is_one_of(made, telling) and (inputs := made_of(made)):
        made = inputs[0]
    return made


def _is_one_of(dataset: Any, words: Sequence[str]) -> bool:
    return any(word in type(dataset).__name__ for word in words)


def _alike(dataset: Any, *, unknown: bool = False) -> bool:
    """Whether all tensors have the same axis 0. `unknown`: one of unknown size may be the same as any."""
    shapes = [leaf.shape for leaf in leaves(dataset.element_spec)]
    if any(shape.rank is None for shape in shapes):
        return True
    sizes = {shape[0] for shape in shapes if shape.rank}
    return all(shape.rank for shape in shapes) and len(sizes - {None} if unknown else sizes) <= 1


def _as_arrays(element: Any) -> Any:
    return map_leaves(np.asarray, as_tuple(element))


def _name(data: Any) -> str:
    kind = type(data).__name__
    return "a tf.data.Dataset" if _is_dataset(data) else f"data of the type {kind}"
