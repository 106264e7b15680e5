"""Which way an optimizer runs: on the parameter server, where its state is shared and survives workers, or on the worker.

The parameter server knows SGD (with momentum, Nesterov), Adam (AMSGrad not), AdamW and Adagrad exactly as Keras
computes them. Clipping happens on the worker, before the push, as Keras clips before it updates. A learning-rate
schedule is evaluated on the samples that the parameter server has seen. What the server cannot do exactly runs on the
worker with Keras' own code, and what travels is the difference that its step made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["sgd", "adam", "adamw", "adagrad"]

EXACT: dict[str, Kind] = {"SGD": "sgd", "Adam": "adam", "AdamW": "adamw", "Adagrad": "adagrad"}


@dataclass(frozen=True)
class ServerSide:
    """An optimizer that the parameter server runs: its kind and hyperparameters under Keras' names."""

    kind: Kind
    learning_rate: float
    momentum: float = 0.0
    nesterov: bool = False
    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-7
    initial_accumulator_value: float = 0.1
    weight_decay: float = 0.0
    scheduled: bool = False


@dataclass(frozen=True)
class WorkerSide:
    """An optimizer (or `train_step`) that runs on the worker, and why."""

    reason: str


def place(model: Any) -> ServerSide | WorkerSide:
    """Decide for a compiled Keras model."""
    import keras  # noqa: PLC0415  this module is also read where there is no Keras

    if type(model).train_step is not keras.Model.train_step:
        return WorkerSide("the model has its own train_step")
    optimizer = unwrap(model.optimizer)
    name = type(optimizer).__name__
    if type(optimizer) not in {getattr(keras.optimizers, known) for known in EXACT}:
        return WorkerSide(f"the parameter server has no {name}")
    if getattr(optimizer, "amsgrad", False):
        return WorkerSide(f"{name}(amsgrad=True)")
    if optimizer.use_ema:
        return WorkerSide(f"{name}(use_ema=True)")
    if optimizer.gradient_accumulation_steps:
        return WorkerSide(f"{name}(gradient_accumulation_steps={optimizer.gradient_accumulation_steps})")
    if any(getattr(v, "constraint", None) is not None for v in model.trainable_variables):
        return WorkerSide("a variable has a constraint")
    if any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables):
        return WorkerSide("float8 variables are overwritten by their gradients")
    excludes = getattr(optimizer, "_exclude_from_weight_decay", None) or getattr(
        optimizer, "_exclude_from_weight_decay_pattern", None
    )
    if optimizer.weight_decay and excludes:
        return WorkerSide("some variables are excluded from weight decay")
    return ServerSide(
        kind=EXACT[name],
        learning_rate=float(optimizer.learning_rate.numpy())
        if hasattr(optimizer.learning_rate, "numpy")
        else float(optimizer.learning_rate),
        momentum=float(getattr(optimizer, "momentum", 0.0)),
        nesterov=bool(getattr(optimizer, "nesterov", False)),
        beta_1=float(getattr(optimizer, "beta_1", 0.9)),
        beta_2=float(getattr(optimizer, "beta_2", 0.999)),
        epsilon=float(getattr(optimizer, "epsilon", 1e-7)),
        initial_accumulator_value=float(getattr(optimizer, "initial_accumulator_value", 0.1)),
        weight_decay=float(optimizer.weight_decay or 0.0),
        scheduled=schedule_of(optimizer) is not None,
    )


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside a `LossScaleOptimizer` (mixed_float16), else itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def schedule_of(optimizer: Any) -> Any | None:
    """The optimizer's learning-rate schedule or callable, None where the rate is a number."""
    rate = unwrap(optimizer)._learning_rate
    return rate if callable(rate) and not hasattr(rate, "assign") else None
