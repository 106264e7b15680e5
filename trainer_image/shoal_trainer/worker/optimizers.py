"""Decides where the optimizer runs: on the parameter servers, which share and save its state, or on the workers.

The parameter servers implement SGD (with momentum, Nesterov), Adam (without AMSGrad), AdamW, Nadam, Lion, RMSprop (not
centered) and Adagrad exactly as Keras, and Keras' learning-rate schedules, as a function of the samples seen. The
worker clips before the push, as Keras clips before the update. All other optimizers run on the workers with Keras'
code, and the push carries the difference made by the step.

The gradient of an Embedding is summed per row, as in any other layer. Keras 3 on TensorFlow squares and clips what each
position in the batch contributes to a row one by one, which no other backend of it does. For that alone the optimizer's
state is not left to the workers, each with its own, lost with the worker.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import keras
import numpy as np

from shoal_trainer.errors import UserError
from shoal_trainer.ps.schedules import KNOWN as KNOWN_SCHEDULES
from shoal_trainer.wire.messages import OptimizerConfig, Schedule
from shoal_trainer.worker.keras_internals import decays, layers_of, learning_rate_of
from shoal_trainer.worker.layout import Layout

log = logging.getLogger(__name__)

NAMES: dict[type, Literal["sgd", "adam", "adamw", "nadam", "lion", "rmsprop", "adagrad"]] = {
    keras.optimizers.SGD: "sgd",
    keras.optimizers.Adam: "adam",
    keras.optimizers.AdamW: "adamw",
    keras.optimizers.Nadam: "nadam",
    keras.optimizers.Lion: "lion",
    keras.optimizers.RMSprop: "rmsprop",
    keras.optimizers.Adagrad: "adagrad",
}

NORMALIZED = (
    *(each for each in NAMES if each is not keras.optimizers.SGD),
    keras.optimizers.Adadelta,
    keras.optimizers.Adafactor,
    keras.optimizers.Adamax,
    keras.optimizers.Lamb,
    keras.optimizers.Muon,
)
"""Optimizers that divide by the size of gradients, also where they run on the workers. Of others nobody knows it."""


@dataclass(frozen=True)
class Placement:
    """Where the optimizer runs. `reason` says why the worker runs it; empty if the parameter servers do.

    `rate(samples)` is the learning rate to send with a push, if only the worker can evaluate it.
    """

    config: OptimizerConfig
    reason: str = ""
    rate: Callable[[int], float] | None = None

    @property
    def on_server(self) -> bool:
        """Whether pushes carry gradients (else differences)."""
        return not self.reason


def place(
    model: Any, layout: Layout, batch_size: int, untrained: tuple[int, ...] = (), whole: str = ""
) -> Placement:
    """Decide for a built and compiled Keras model; `batch_size` is that of one step of its learning-rate schedule.

    `untrained`: positions of trainable variables that Keras does not update, and therefore does not decay. With
    `gradient_accumulation_steps=k`, one push of weight 1 carries the gradients of k batches. `whole`: see `Findings`.
    """
    if reason := whole or why_worker(model):
        each = parts(model.optimizer)
        _check_on_worker(model, each, reason)
        divides = all(isinstance(part, NORMALIZED) for part in each)
        config = OptimizerConfig(name="delta", learning_rate=1.0, normalized=divides, batch_size=batch_size)
        return Placement(config, reason)
    optimizer = unwrap(model.optimizer)
    _warn_of_state(optimizer)
    rate = learning_rate_of(optimizer)
    worker_rate: Callable[[int], float] | None = None
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        schedule = rate
        name = type(schedule).__name__
        if type(schedule).__module__.startswith("keras.") and name in KNOWN_SCHEDULES:
            learning_rate: float | Schedule = Schedule(name=name, config=_plain(schedule.get_config()))
        else:
            learning_rate = float(schedule(0))

            def worker_rate(samples: int) -> float:
                return float(schedule(config.step_after(samples)))
    elif hasattr(rate, "assign"):
        learning_rate = float(rate.numpy())
    else:
        learning_rate = float(rate())

        def worker_rate(samples: int) -> float:  # noqa: ARG001
            return float(rate())

    config = OptimizerConfig(
        name=NAMES[type(optimizer)],
        learning_rate=learning_rate,
        momentum=float(getattr(optimizer, "momentum", 0.0)),
        nesterov=bool(getattr(optimizer, "nesterov", False)),
        beta_1=float(getattr(optimizer, "beta_1", 0.9)),
        beta_2=float(getattr(optimizer, "beta_2", 0.999)),
        rho=float(getattr(optimizer, "rho", 0.9)),
        epsilon=float(getattr(optimizer, "epsilon", 1e-7)),
        weight_decay=float(optimizer.weight_decay or 0.0),
        initial_accumulator_value=float(getattr(optimizer, "initial_accumulator_value", 0.1)),
        batch_size=batch_size,
        gradient_accumulation_steps=accumulated(model),
        no_decay=_no_decay(optimizer, model, layout, untrained),
    )
    return Placement(config, "", worker_rate)


def _check_on_worker(model: Any, each: list[Any], reason: str) -> None:
    """Raise `UserError` for optimizers that cannot run on several workers, each with its own state."""
    if accumulated(model) > 1:
        raise UserError(
            f"gradient_accumulation_steps={accumulated(model)} is not supported: {reason}. A worker that is lost would "
            "lose batches that count as trained. Leave it out, and use a larger batch size."
        )
    if name := next((type(part).__name__ for part in each if _holds_parameters(part)), ""):
        raise UserError(
            f"{name} is not supported: it computes the parameters from its own state, and each worker has its own. A "
            "worker that joins would undo what the others have trained. Use AdamW or Adagrad, or another optimizer "
            "whose state follows from gradients alone."
        )
    if any(part.use_ema and part.ema_overwrite_frequency for part in each):
        log.warning(
            "ema_overwrite_frequency: each worker overwrites the parameters with its own average. With W workers that "
            "reaches back W times as far, which slows training down. Leave it out: the exported model is the average"
        )


def _holds_parameters(optimizer: Any) -> bool:
    """Whether a fresh optimizer of this kind moves parameters that it did not see before, although gradients are 0.

    So does one that keeps a copy of them (ScheduleFreeAdamW), or their sum with the gradients (Ftrl).
    """
    seen, joined = np.ones((2, 2), np.float32), np.array([[3, -5], [7, 4]], np.float32)
    variable = keras.Variable(seen)
    try:
        fresh = type(optimizer).from_config({**optimizer.get_config(), "learning_rate": 0.1})
        fresh.weight_decay = None
        fresh.build([variable])
        variable.assign(joined)
        for _ in range(6):  # Lookahead returns to its copy every few steps
            fresh.apply([keras.ops.zeros_like(variable)], [variable])
    except Exception:  # of one whose configuration is not complete, or that knows its model's variables only
        return False
    return bool((abs(variable.numpy() - joined) > 0.1).any())


def _warn_of_state(optimizer: Any) -> None:
    """Warn if a loaded optimizer has state, which the parameter servers do not take."""
    if int(optimizer.iterations) > 0:
        log.warning(
            "the model's %s has made %d steps already; the parameter servers start it with fresh state, and its "
            "learning-rate schedule at step 0",
            type(optimizer).__name__, int(optimizer.iterations),
        )  # fmt: skip


def why_worker(model: Any) -> str:
    """Why the parameter servers cannot run this model's optimizer exactly; empty if they can."""
    if reason := why_whole(model):
        return reason
    optimizer = unwrap(model.optimizer)
    name = type(optimizer).__name__
    if type(optimizer) not in NAMES:
        return f"the parameter servers do not implement {name}"
    if getattr(optimizer, "amsgrad", False):
        return f"{name}(amsgrad=True)"
    if getattr(optimizer, "centered", False):
        return f"{name}(centered=True)"
    if optimizer.use_ema:
        return f"{name}(use_ema=True)"
    if any(getattr(v, "constraint", None) is not None for v in model.trainable_variables):
        return "a variable has a constraint"
    return ""


def why_whole(model: Any) -> str:
    """Why only Keras' whole step can compute this model, and no part of it apart; "": a trace shows it (`Findings`)."""
    if has_own_step(model):
        return "the model has a custom train_step"
    if any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables):
        return "float8 variables are overwritten by their gradients"
    for layer in layers_of(model):
        if hasattr(layer.call, "get_concrete_function"):
            return (
                f"call() of the layer {layer.name!r} is a tf.function, which has traced the layer's variables"
            )
    return ""


def why_one_device(model: Any) -> str:
    """Why several devices cannot compute parts of a step of this model, whose optimizer runs on the worker."""
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.loss_scale_factor is not None:
        return "its optimizer runs on the worker, and scales the loss"
    return why_whole(model)


def takes_rows_apart(model: Any) -> bool:
    """Whether plain Keras does not sum the repeated rows of a gradient for this optimizer.

    It does not if it only adds gradients, or if it accumulates batches, which Keras does in a dense array.
    """
    optimizer = unwrap(model.optimizer)
    return accumulated(model) == 1 and (NAMES.get(type(optimizer)) != "sgd" or clips(optimizer))


def has_own_step(model: Any) -> bool:
    """Whether the model overrides `train_step`."""
    return type(model).train_step is not keras.Model.train_step


def has_call(model: Any) -> bool:
    """Whether the model overrides `call`; a model with a `train_step` (a VAE, a GAN) need not."""
    return type(model).call is not keras.Model.call


def accumulated(model: Any) -> int:
    """The number of batches per update of the model's optimizer."""
    return max(int(part.gradient_accumulation_steps or 1) for part in parts(model.optimizer))


def clips(optimizer: Any) -> bool:
    """Whether the optimizer clips gradients."""
    return any(
        limit is not None for limit in (optimizer.clipnorm, optimizer.global_clipnorm, optimizer.clipvalue)
    )


def unwrap(optimizer: Any) -> Any:
    """The optimizer inside a `LossScaleOptimizer` (mixed_float16), else itself."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def parts(optimizer: Any) -> list[Any]:
    """The optimizers that update variables: those of a built `MultiOptimizer`, else the one."""
    inner = unwrap(optimizer)
    return list(inner.optimizers) if isinstance(inner, keras.optimizers.MultiOptimizer) else [inner]


def averages(model: Any) -> bool:
    """Whether the optimizer averages parameters (`use_ema`)."""
    return any(part.use_ema for part in parts(model.optimizer))


def take_average(model: Any) -> None:
    """With `use_ema`, replace the parameters by their average, as Keras' `fit` does at its end.

    The average is that of this worker; a worker without a step has none, and keeps the parameters.
    """
    optimizer = unwrap(model.optimizer)
    if averages(model) and int(optimizer.iterations) > 0:
        optimizer.finalize_variable_values(model.trainable_variables)


def _no_decay(
    optimizer: Any, model: Any, layout: Layout, untrained: tuple[int, ...]
) -> tuple[tuple[int, int], ...]:
    """The ranges of the flat vector that `exclude_from_weight_decay` excludes, or that have no gradient."""
    if not optimizer.weight_decay:
        return ()
    entries = enumerate(zip(model.trainable_variables, layout.entries, strict=False))
    return tuple(
        (e.offset, e.offset + e.size)
        for index, (v, e) in entries
        if index in untrained or not decays(optimizer, v)
    )


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    """A schedule's `get_config()` without its name, with Python numbers and lists."""
    return {
        key: value.tolist() if hasattr(value, "tolist") else value
        for key, value in config.items()
        if key != "name" and not (isinstance(value, float) and math.isnan(value))
    }
