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
from shoal_trainer.data.batch import Batch, leaves, map_leaves, paths_of
from shoal_trainer.data.source import Epochs, Part, Source
from shoal_trainer.errors import UserError
from shoal_trainer.training import Training
from shoal_trainer.worker.inputs import check_whole
from shoal_trainer.worker.keras_internals import batches_taken_first
from shoal_trainer.worker.weighing import weigh_samples


def fit(job: Training, *, epochs: int, batch_size: int, verbose: int | str) -> keras.Model:
    """Return the trained model. Ranges and files are visited as by workers, in a different order in each epoch."""
    keras.utils.set_random_seed(job.seed)
    model = job.model()
    weigh_samples(model)
    visit, epoch = Visits(job, batch_size), itertools.count()
    ended: list[BaseException] = []
    training = dataset_of(lambda: visit(next(epoch)), job.data.example(batch_size), ended)
    if visit.batches is not None:  # of unknown length, Keras counts one step more in each epoch
        training = training.apply(tf.data.experimental.assert_cardinality(visit.batches))
    validation = None
    if job.validation is not None:
        source, first = job.validation, next(validation_batches(job.validation, batch_size))
        validation = dataset_of(lambda: validation_batches(source, batch_size), first, ended)
    with quiet_end(), as_raised(ended), batches_taken_first(model, "train", "test"):
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
    """The batches of each epoch, in the order of a single worker; of a `Stream`, in its own, as Keras reads it."""

    def __init__(self, job: Training, batch_size: int) -> None:
        extent = job.data.describe()
        self._data: Source = job.data.placed(job.seed)
        self._batch_size = batch_size
        self._epochs: Epochs | None = self._data.epochs(batch_size)
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
        if self._epochs is not None:
            return self._epochs.batches
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
        if self._epochs is not None:
            yield from self._epochs.read()
            return
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


def as_keras(batch: Batch) -> Any:
    """The real samples of a batch, as Keras' `fit` and `evaluate` take them."""
    return _tuples(batch.as_given())


def dataset_of(
    iterate: Callable[[], Iterator[Batch]], example: Batch, ended: list[BaseException]
) -> tf.data.Dataset:
    """The data set for `fit` and `evaluate`: each iteration calls `iterate` once. `example` is one of its batches.

    Others may differ from it in any size (see `batches_taken_first`): short batches are not padded, as Keras accepts
    them. An error of `iterate` is added to `ended`, because TensorFlow replaces it (see `as_raised`).
    """

    def rows() -> Iterator[Any]:
        try:
            for batch in iterate():
                element = as_keras(batch)
                if (
                    paths_of(element) == paths
                ):  # of other parts than the first batch's TensorFlow tells in words
                    for leaf, wanted in zip(leaves(element), leaves(signature), strict=True):
                        if isinstance(leaf, np.ndarray):
                            check_whole(leaf, wanted)
                yield element
        except (Exception, SystemExit) as error:
            ended.append(error)
            raise

    def spec(leaf: Any) -> tf.TensorSpec:
        tensor = tf.convert_to_tensor(leaf)
        return tf.TensorSpec([None] * tensor.shape.rank, tensor.dtype)

    signature = map_leaves(spec, as_keras(example))
    paths = paths_of(signature)
    return tf.data.Dataset.from_generator(rows, output_signature=signature).prefetch(2)


def _tuples(structure: Any) -> Any:
    """Convert lists to tuples, as Keras' `fit` does: a Dataset converts a list to an array."""
    if isinstance(structure, dict):
        return {key: _tuples(part) for key, part in structure.items()}
    if isinstance(structure, tuple) and hasattr(structure, "_fields"):
        return type(structure)(*(_tuples(part) for part in structure))
    return tuple(_tuples(part) for part in structure) if isinstance(structure, tuple | list) else structure
