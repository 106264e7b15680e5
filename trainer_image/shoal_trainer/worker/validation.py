"""Begins to read `Training.validation`: for an evaluation, and once in a job before anything is trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import keras
import numpy as np

from shoal_trainer.data.batch import Batch, leaves
from shoal_trainer.data.preprocessed import preprocessed
from shoal_trainer.data.user_code import where
from shoal_trainer.errors import TrainerError, Unreachable, UserError
from shoal_trainer.training import Training
from shoal_trainer.worker.alone import validation_batches
from shoal_trainer.worker.flat_model import FlatModel

Rows = Iterator[Batch]


def look(job: Training, flat_model: FlatModel, batch_size: int) -> None:
    """Raise `UserError` for validation data that cannot be read in batches as the training data, after one batch.

    An outage is left to the evaluation.
    """
    if job.validation is not None:
        with contextlib.suppress(Unreachable), blamed():
            begun(job, flat_model, batch_size)


def begun(
    job: Training, flat_model: FlatModel, batch_size: int, through: Callable[[Rows], Rows] = iter
) -> tuple[Batch, Rows]:
    """The first batch, and those after it. `through`: what they pass through when they are read."""
    source, model = job.validation, flat_model.model
    if not evaluates_itself(model):
        source = preprocessed(source, model)
    rows = through(validation_batches(source, batch_size))
    first = next(rows)
    _check_alike(first, flat_model.example)
    return first, rows


def evaluates_itself(model: keras.Model) -> bool:
    """Whether the model has an `evaluate` of its own, other than KerasHub's, which only preprocesses."""
    owner = next(kind for kind in type(model).__mro__ if "evaluate" in vars(kind))
    return vars(owner)["evaluate"] is not keras.Model.evaluate and "preprocess_samples" not in vars(owner)


@contextlib.contextmanager
def blamed() -> Iterator[None]:
    """What the user's data or model raise in this block is told as the evaluation's error."""
    try:
        yield
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        hint = " Yield single samples: do not batch." if "Cannot batch tensors" in str(error) else ""
        raise UserError(f"The evaluation on Training(validation=…) failed: {where(error)}{hint}") from error


def _check_alike(first: Batch, example: Batch) -> None:
    """Raise `UserError` if the validation data are batched: they have one axis more than the training data."""
    ranks = [[np.ndim(leaf) for leaf in leaves(batch.x)] for batch in (first, example)]
    if all(len(rank) == 1 for rank in ranks) and ranks[0][0] == ranks[1][0] + 1:
        raise UserError(
            f"Training(validation=…) yields samples with {ranks[0][0] - 1} axes, the training data with "
            f"{ranks[1][0] - 1}. Yield single samples: do not batch."
        )
