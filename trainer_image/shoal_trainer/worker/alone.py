"""`Training.fit`: the user's script alone in one process, with Keras' own `fit` and nothing of Shoal between."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import tensorflow as tf

from shoal_trainer.data.batch import Batch, batches, map_leaves
from shoal_trainer.data.files import Files
from shoal_trainer.data.indexed import Arrays, Indexed, require_dataset
from shoal_trainer.errors import UserError
from shoal_trainer.training import Training


def fit(job: Training, *, epochs: int, batch_size: int, verbose: int | str) -> keras.Model:
    """The trained model. The data are visited as workers would visit them, in another order in every epoch."""
    keras.utils.set_random_seed(job.seed)
    model = job.model()
    example = job.data.example(batch_size)
    source = iter(range(10**9))
    training = dataset_of(lambda: whole(job.data, next(source), batch_size), example)
    validation = None
    if job.validation is not None:
        judged = next(validation_batches(job.validation, batch_size))
        validation = dataset_of(lambda: validation_batches(job.validation, batch_size), judged)
    callbacks = list(job.callbacks()) if job.callbacks else []
    with quiet_end():
        model.fit(training, epochs=epochs, validation_data=validation, callbacks=callbacks, verbose=verbose)
    return model


@contextlib.contextmanager
def quiet_end() -> Iterator[None]:
    """Keras warns when a data set of unknown length ends; here every one does."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


def whole(data: Indexed | Arrays | Files, epoch: int, batch_size: int) -> Iterator[Batch]:
    """One pass over the data."""
    if isinstance(data, Files):
        for name in data.list():
            yield from data.batches(name, 0, None, batch_size)
    else:
        yield from data.batches(epoch, 0, data.size, batch_size)


def validation_batches(source: Any, batch_size: int) -> Iterator[Batch]:
    """One pass over `Training.validation`, in whichever of its forms it was given. `UserError` where it is empty."""
    if isinstance(source, Indexed | Arrays | Files):
        found = whole(source, 0, batch_size)
    else:
        dataset = source()
        require_dataset(dataset, "Training(validation=…)")
        rows = iter(dataset.batch(batch_size).prefetch(2))
        found = batches(rows, batch_size, 0, None, "Training(validation=…)")
    first = next(found, None)
    if first is None:
        raise UserError("Training(validation=…) has no sample. Give some, or leave it out.")
    yield first
    yield from found


def dataset_of(passes: Callable[[], Iterator[Batch]], example: Batch) -> tf.data.Dataset:
    """What `fit` and `evaluate` read: each pass of it calls `passes` once. `example` is one of its batches.

    Keras itself takes short batches: nothing is filled up here.
    """

    def rows() -> Iterator[Any]:
        for batch in passes():
            yield form(batch)

    def form(batch: Batch) -> Any:
        given = batch.as_given()
        return given[:1] if batch.parts == 3 and batch.y is None else given  # a Dataset has no place for None

    def spec(leaf: Any) -> tf.TensorSpec:
        tensor = tf.convert_to_tensor(leaf)
        return tf.TensorSpec((None, *tensor.shape[1:]), tensor.dtype)

    signature = map_leaves(spec, form(example))
    return tf.data.Dataset.from_generator(rows, output_signature=signature).prefetch(2)
