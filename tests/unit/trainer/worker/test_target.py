"""A target metric that no evaluation gives, or validation data that none can read, end the job before training."""

import dataclasses
import threading
from contextlib import nullcontext

import pytest
import tensorflow as tf

from shoal_trainer import Indexed
from shoal_trainer.contract import StopAfter
from shoal_trainer.errors import UserError
from shoal_trainer.worker.compose import build_flat_model, compose
from shoal_trainer.worker.target import check_target
from tests.unit.trainer.worker.fakes import FakeCoordinator
from tests.unit.trainer.worker.models import DATA, X, Y, job

EVALUATED = ["val_loss", "val_accuracy", "val_dice"]


@pytest.mark.parametrize(
    ("metric", "evaluated", "words"),
    [
        ("val_acuracy", EVALUATED, "unknown metric val_acuracy; known: val_loss, .*Did you mean val_accuracy"),
        ("iou", EVALUATED, "unknown metric iou; known: val_loss, val_accuracy, val_dice."),
        ("val_dice", EVALUATED, "unknown whether lower or higher is better. Set the mode to min or max"),
        ("val_dice", None, "unknown whether lower or higher is better"),
        ("val_accuracy", [], "nothing is evaluated without"),
    ],
)  # fmt: skip
def test_unreachable_target_is_refused(metric, evaluated, words):
    with pytest.raises(UserError, match=words):
        check_target(StopAfter(metric=metric, value=0.9), evaluated)


@pytest.mark.parametrize(
    "stop_after",
    [
        StopAfter(epochs=3),
        StopAfter(metric="val_accuracy", value=0.9),
        StopAfter(metric="accuracy", value=0.9),
        StopAfter(metric="dice", value=0.9, mode="Max"),
    ],
)
def test_reachable_target_is_accepted(stop_after):
    check_target(stop_after, EVALUATED)


def test_worker_with_an_unknown_target_does_not_start(start_servers):
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers, training = start_servers(coordinator), job()
    stop_after = StopAfter(metric="val_acuracy", value=0.9)
    config = servers.config().model_copy(update={"stop_after": stop_after})
    flat_model = build_flat_model(training, config)
    with pytest.raises(UserError, match="unknown metric val_acuracy; known: val_loss, val_accuracy"):
        compose(training, config, flat_model, coordinator, servers.credentials, threading.Event())


def test_batched_validation_data_end_the_job_before_its_first_step(start_servers):
    """They are looked at by the first worker; one that joins a job which trains does not wait for them."""
    batched = Indexed(8, lambda *_: tf.data.Dataset.from_tensor_slices((X[:16], Y[:16])).batch(2), shuffle=0)
    coordinator = FakeCoordinator(DATA.size, tasks=())
    servers, training = start_servers(coordinator), dataclasses.replace(job(), validation=batched)
    for index, incarnation in ((0, 0), (0, 1), (1, 0)):
        config = servers.config().model_copy(update={"index": index, "incarnation": incarnation})
        flat_model = build_flat_model(training, config)
        with (
            pytest.raises(UserError, match="do not batch")
            if (index, incarnation) == (0, 0)
            else nullcontext()
        ):
            compose(training, config, flat_model, coordinator, servers.credentials, threading.Event()).close()
