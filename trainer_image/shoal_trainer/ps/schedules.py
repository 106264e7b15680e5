"""Keras' learning-rate schedules without Keras, because the parameter server does not import TensorFlow.

A step is `batch_size` samples seen by the server, so a schedule does not depend on the number of workers. Formulas:
https://keras.io/api/optimizers/learning_rate_schedules/. A worker evaluates any other schedule itself and sends the
learning rate with its push.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal_trainer.errors import UserError
from shoal_trainer.wire.messages import Schedule

Config = Mapping[str, Any]


def _exponential(c: Config, step: float) -> float:
    p = step / c["decay_steps"]
    return float(c["initial_learning_rate"] * c["decay_rate"] ** (math.floor(p) if c.get("staircase") else p))


def _inverse_time(c: Config, step: float) -> float:
    p = step / c["decay_steps"]
    return float(
        c["initial_learning_rate"] / (1 + c["decay_rate"] * (math.floor(p) if c.get("staircase") else p))
    )


def _polynomial(c: Config, step: float) -> float:
    steps = c["decay_steps"]
    if c.get("cycle"):
        steps = steps * max(1, math.ceil(step / steps))
    else:
        step = min(step, steps)
    end = c.get("end_learning_rate", 1e-4)
    return float((c["initial_learning_rate"] - end) * (1 - step / steps) ** c.get("power", 1.0) + end)


def _piecewise(c: Config, step: float) -> float:
    for boundary, value in zip(c["boundaries"], c["values"], strict=False):
        if step <= boundary:
            return float(value)
    return float(c["values"][-1])


def _cosine(c: Config, step: float) -> float:
    initial, alpha = c["initial_learning_rate"], c.get("alpha", 0.0)
    target, warmup = c.get("warmup_target"), c.get("warmup_steps", 0)
    if target is not None:
        if step < warmup:
            return float((target - initial) * step / warmup + initial)
        step, initial = step - warmup, target
    share = min(step, c["decay_steps"]) / c["decay_steps"]
    return float(initial * ((1 - alpha) * 0.5 * (1 + math.cos(math.pi * share)) + alpha))


def _cosine_restarts(c: Config, step: float) -> float:
    t_mul, m_mul, alpha = c.get("t_mul", 2.0), c.get("m_mul", 1.0), c.get("alpha", 0.0)
    done = step / c["first_decay_steps"]
    if t_mul == 1.0:
        restart = math.floor(done)
        done -= restart
    else:
        restart = math.floor(math.log(1 - done * (1 - t_mul)) / math.log(t_mul))
        done = (done - (1 - t_mul**restart) / (1 - t_mul)) / t_mul**restart
    share = 0.5 * m_mul**restart * (1 + math.cos(math.pi * done))
    return float(c["initial_learning_rate"] * ((1 - alpha) * share + alpha))


KNOWN: Mapping[str, Callable[[Config, float], float]] = {
    "CosineDecay": _cosine,
    "CosineDecayRestarts": _cosine_restarts,
    "ExponentialDecay": _exponential,
    "InverseTimeDecay": _inverse_time,
    "PiecewiseConstantDecay": _piecewise,
    "PolynomialDecay": _polynomial,
}


def learning_rate(rate: float | Schedule, step: float) -> float:
    """The learning rate at `step` (batches of the reference size, like Keras' `iterations`).

    `UserError` if the schedule is unknown or fails.
    """
    if isinstance(rate, Schedule):
        try:
            return KNOWN[rate.name](rate.config, step)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            raise UserError(
                f"the learning-rate schedule {rate.name} cannot be evaluated: {error!r}"
            ) from None
    return rate
