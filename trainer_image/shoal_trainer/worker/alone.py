"""`Training.fit`: training in one process with Keras' own `fit`."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from shoal_trainer.coordinator.ranges import Ranges
from shoal_trainer.data.batch import Batch, leaves, map_leaves
from shoal_trainer.data.source import Part, Source
from shoal_trainer.errors import UserError
from shoal_trainer.training import Training
from shoal_trainer.worker.weighing import weigh_samples


def fit(job: Training, *, epochs: int, batch_size: int, verbose: int | str) -> keras.Model:
    """Return the trained model. Ranges and files are visited as by workers, in a different order in each epoch."""
    keras.utils.set_random_seed(job.seed)
    model = job.model()
    weigh_samples(model)
    visit, epoch = Visits(job, batch_size), itertools.count()
    ended: list[BaseException] = []
    example = job.data.example(batch_size)
    training = dataset_of(
        lambda: visit(next(epoch)), example, ended, varying(model, job.data.lengths, example)
    )
    if visit.batches is not None:  # of unknown length, Keras counts one step more in each epoch
        training = training.apply(tf.data.experimental.assert_cardinality(visit.batches))
    validation = None
    if job.validation is not None:
        judged = next(validation_batches(job.validation, batch_size))
        validation = validation_dataset(job.validation, batch_size, model, judged, ended)
    with quiet_end(), as_raised(ended):
        model.fit(
            training,
            epochs=epochs,
            validation_data=validation,
            callbacks=job.callbacks() if job.callbacks else None,
            verbose=verbose,
            shuffle=False,
        )
    return model


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """Suppress Keras' warning at the end of a data set of unknown length."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


@contextlib.contextmanager
def as_raised(ended: Sequence[BaseException]) -> Iterator[None]:
    """Raise the original error from the batches of `dataset_of` instead of TensorFlow's wrapper."""
    try:
        yield
    except Exception as error:
        if ended:
            raise ended[-1] from error
        raise


class Visits:
    """The batches of each epoch, in the order of a single worker."""

    def __init__(self, job: Training, batch_size: int) -> None:
        extent = job.data.describe()
        self._data, self._batch_size = job.data.placed(job.seed), batch_size
        self._files = extent.files
        self._ranges = Ranges.of(
            size=extent.size,
            files=len(self._files),
            batch_size=batch_size,
            seed=str(job.seed),
            block=self._data.block,
        )

    @property
    def batches(self) -> int | None:
        """How many an epoch has; None where only reading tells."""
        if self._ranges.size is None or self._data.lengths:
            return None
        sizes = (
            segment.stop - segment.start
            for segment in self._ranges.visiting(0, {})
            if segment.stop is not None
        )
        return sum(-(-size // self._batch_size) for size in sizes)

    def __call__(self, epoch: int) -> Iterator[Batch]:
        """The batches of an epoch."""
        for segment in self._ranges.visiting(epoch, {}):
            file = self._files[segment.file] if self._files else None
            yield from self._data.read(Part(segment.start, segment.stop, epoch, file), self._batch_size)


def validation_batches(source: Source, batch_size: int) -> Iterator[Batch]:
    """The batches of `Training.validation`. Raises `UserError` if it is empty."""
    remaining = source.whole(batch_size)
    first = next(remaining, None)
    if first is None:
        raise UserError("Training(validation=…) has no samples. Add some, or leave validation out.")
    yield first
    yield from remaining


def validation_dataset(
    source: Source,
    batch_size: int,
    model: keras.Model,
    example: Batch,
    ended: list[BaseException],
    watched: Callable[[Iterator[Batch]], Iterator[Batch]] = iter,
) -> tf.data.Dataset:
    """`Training.validation` as the data set of `fit` and `evaluate`. `example`, `ended`: as in `dataset_of`.

    `watched`: what its batches pass through.
    """
    axes = varying(model, source.lengths, example)
    return dataset_of(lambda: watched(validation_batches(source, batch_size)), example, ended, axes)


def varying(model: keras.Model, lengths: Sequence[int], example: Batch) -> Iterator[tuple[int, ...]]:
    """The axes in which batches may differ, for each array of `example`.

    Of an input of the model, those of unknown size; of what is none, the axis that `lengths` are of. Of labels and
    weights, those that are as long.
    """

    def free(leaf: Any, given: Any) -> tuple[int, ...]:
        if given is None:
            return (1,) if np.ndim(leaf) > 1 and leaf.shape[1] in lengths else ()
        return tuple(axis for axis, size in enumerate(given.shape) if axis and size is None)

    x, others = list(leaves(example.x)), list(leaves((example.y, example.weights)))
    found = list(map(free, x, _inputs(model, example.x)))
    sizes = {leaf.shape[axis] for leaf, axes in zip(x, found, strict=True) for axis in axes} - {1}
    yield from found
    for leaf in others:
        yield tuple(axis for axis, size in enumerate(leaf.shape) if axis and size in sizes)


def _inputs(model: keras.Model, x: Any) -> list[Any]:
    """The input of a functional model for each array of x, which may be given by name; None for one that is none."""
    count, inputs = len(list(leaves(x))), list(getattr(model, "inputs", None) or ())
    if inputs and isinstance(x, dict) and len(x) == count:
        named = model.input if isinstance(model.input, dict) else {each.name: each for each in inputs}
        if named.keys() <= x.keys():
            return [named.get(name) for name in sorted(x)]
    return inputs if len(inputs) == count else [None] * count


def as_keras(batch: Batch) -> Any:
    """The real samples of a batch, as Keras' `fit` and `evaluate` take them."""
    element = batch.as_given()
    # A Dataset cannot hold None.
    return _tuples(element[:1] if batch.parts == 3 and batch.y is None else element)


def dataset_of(
    iterate: Callable[[], Iterator[Batch]],
    example: Batch,
    ended: list[BaseException],
    axes: Iterator[tuple[int, ...]],
) -> tf.data.Dataset:
    """The data set for `fit`: each iteration calls `iterate` once. `example` is one of its batches.

    `axes`: in which others may have another size (see `varying`). Short batches are not padded, as Keras accepts them.
    An error of `iterate` is added to `ended`, because TensorFlow replaces it (see `as_raised`).
    """

    def rows() -> Iterator[Any]:
        try:
            for batch in iterate():
                yield as_keras(batch)
        except (Exception, SystemExit) as error:
            ended.append(error)
            raise

    def spec(leaf: Any) -> tf.TensorSpec:
        tensor, free = tf.convert_to_tensor(leaf), (0, *next(axes))
        return tf.TensorSpec(
            [None if axis in free else n for axis, n in enumerate(tensor.shape)], tensor.dtype
        )

    signature = map_leaves(spec, as_keras(example))
    return tf.data.Dataset.from_generator(rows, output_signature=signature).prefetch(2)


def _tuples(structure: Any) -> Any:
    """Convert lists to tuples, as Keras' `fit` does: a Dataset converts a list to an array."""
    if isinstance(structure, dict):
        return {key: _tuples(part) for key, part in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_tuples(part) for part in structure))
    return tuple(_tuples(part) for part in structure) if isinstance(structure, tuple | list) else structure
