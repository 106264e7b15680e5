"""Whoever names no batch size trains batches of one size, whichever way the job is run: Keras' own."""

from __future__ import annotations

import inspect

import keras
import numpy as np

from shoal.api.training_job import TrainingSpec
from shoal.client.manifest import Submission
from shoal_trainer.contract import BATCH_SIZE, RuntimeConfig
from shoal_trainer.run.processes import LocalJob
from shoal_trainer.wire.messages import OptimizerConfig


def test_there_is_one_default_batch_size() -> None:
    models = (TrainingSpec, RuntimeConfig, OptimizerConfig)
    defaults = [each.model_fields["batch_size"].default for each in models]
    defaults += [inspect.signature(each).parameters["batch_size"].default for each in (Submission, LocalJob)]
    assert defaults == [BATCH_SIZE] * 5
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.fit(np.zeros((65, 1)), np.zeros(65), verbose=0)
    assert (
        int(model.optimizer.iterations.numpy()) == 3
    )  # of 32, 32 and 1; as in `Training.fit` (test_alone.py)
    assert BATCH_SIZE == 32
