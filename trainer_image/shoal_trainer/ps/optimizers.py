"""The optimizer of one shard: its state, and the kernels that update each part of the shard.

The state is that of Keras' optimizers: one vector for momentum, two for Adam. A push's weight (samples, staleness)
multiplies the learning rate, not the gradient, so momentum and second moments keep their scale.

A worker's next gradient arrives some updates after its parameters were read. So an answer may have the parameters
`ahead` updates later, as far as the optimizer's velocity tells (arXiv 1907.11612): the gradient is computed where it
will be applied. An optimizer without velocity (SGD without momentum, Adagrad) answers with its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.kernels import Buffer, Vector
from shoal_trainer.ps.pieces import Payload, parts
from shoal_trainer.wire.messages import OptimizerConfig

STATE = {
    "sgd": (),
    "momentum": ("momentum",),
    "adam": ("m", "v"),
    "adamw": ("m", "v"),
    "adagrad": ("a",),
    "delta": (),
}


class Update(NamedTuple):
    """The learning rate of one push, the optimizer's step (from 1), and the `pace` of `Damping`.

    `ahead`: by how many updates the answer anticipates; `next_rate`: their learning rate (nan: `rate`). `before`: the
    pace at which the velocity was made.
    """

    rate: float
    step: int
    pace: float = 1.0
    ahead: float = 0.0
    next_rate: float = math.nan
    before: float = 1.0


class Optimizer:
    """The optimizer `config` for `size` trainable values from `offset` of the flat vector.

    `kept`: existing state to continue with, by name, each of shape (size,).
    """

    def __init__(
        self, config: OptimizerConfig, offset: int, size: int, kept: Mapping[str, Vector] | None = None
    ) -> None:
        self.config = config
        self.size = size
        rule = "momentum" if config.name == "sgd" and config.momentum else config.name
        self.state: dict[str, Vector] = {name: aligned(size) for name in STATE[rule]}
        if rule == "adagrad":
            self.state["a"].fill(config.initial_accumulator_value)
        for name, values in (kept or {}).items():
            if name in self.state:
                self.state[name][:] = values
        self._segments = tuple(_segments(config, offset, size))

    def apply(self, w: Vector, io: Payload, update: Update) -> bool:
        """Apply the gradient in the first `size` values of `io` to `w`, and write the new parameters to `io`.

        `io` may have only some of the values, and threads may apply other parts at the same time: rules go value by
        value, and what they need of a whole gradient is in `update`. Returns whether the gradient had non-finite values
        (replaced by 0).
        """
        non_finite = False
        for low, high, decays in self._segments:
            for part, values in parts(io, low, high):
                non_finite |= self._apply(part, w[part], values, update, decays)
        return non_finite

    def anticipate(self, w: Vector, io: Payload, update: Update) -> None:
        """Write the parameters `update.ahead` updates later to the first `size` values of `io`."""
        c, f = self.config, np.float32
        for part, values in parts(io, 0, self.size):
            state = {name: values[part] for name, values in self.state.items()}
            if update.ahead and "momentum" in state:
                ahead = update.ahead * _glide(c, update.pace) * stretch(update.before) / stretch(update.pace)
                kernels.glide(w[part], state["momentum"], values, f(ahead))
            elif update.ahead and "m" in state and update.step > 1:
                beta = adam_momentum(c, update.pace)
                ahead = update.ahead * beta * float(_alpha(c, beta, update.rate, update.step))
                kernels.glide_adam(w[part], state["m"], state["v"], values, f(ahead), f(c.epsilon))
            else:
                kernels.encode(w[part], values)

    def _apply(self, part: slice, w: Vector, io: Buffer, update: Update, decays: bool) -> bool:
        c, f = self.config, np.float32
        rate = f(update.rate)
        decay = f(update.rate * c.weight_decay if decays else 0.0)
        state = {name: values[part] for name, values in self.state.items()}
        if c.name in {"adam", "adamw"}:
            beta = adam_momentum(c, update.pace)
            alpha = _alpha(c, beta, update.rate, update.step)
            low, high = f(1 - beta), f(1 - c.beta_2)
            ahead: float = update.ahead * beta
            if ahead and alpha and not math.isnan(update.next_rate):
                ahead *= float(_alpha(c, beta, update.next_rate, update.step + 1) / alpha)
            return kernels.adam(
                w, state["m"], state["v"], io, alpha, decay, low, high, f(c.epsilon), f(ahead)
            )
        if c.name == "adagrad":
            return kernels.adagrad(w, state["a"], io, rate, decay, f(c.epsilon))
        if c.name == "delta":  # the step of a worker-side optimizer
            return kernels.add(w, io, rate)
        if "momentum" not in state:
            return kernels.sgd(w, io, rate, decay)
        rule = kernels.nesterov if c.nesterov else kernels.momentum
        # Velocity that was made at another pace still has to go as far as it would have gone there.
        slower = stretch(update.pace)
        kept, rate = (
            f(momentum_at(c, update.before) * stretch(update.before) / slower),
            f(update.rate / slower),
        )
        return rule(w, state["momentum"], io, rate, decay, kept, f(update.ahead * _glide(c, update.pace)))


def stretch(pace: float) -> float:
    """By how much SGD's momentum lasts longer at a normal staleness of `pace`, at a rate that is as much lower."""
    return float(pace**1.25)


def momentum_at(config: OptimizerConfig, pace: float) -> float:
    """The momentum of SGD at a normal staleness of `pace`."""
    return config.momentum if pace == 1 else 1 - (1 - config.momentum) / stretch(pace)


def adam_momentum(config: OptimizerConfig, pace: float) -> float:
    """Adam's beta_1 at a normal staleness of `pace`."""
    return config.beta_1 if pace == 1 else 1 - (1 - config.beta_1) / pace**0.75


def _glide(config: OptimizerConfig, pace: float) -> float:
    """How far SGD's velocity moves the parameters in the next step, without its gradient."""
    mu = momentum_at(config, pace)
    return mu * mu if config.nesterov else mu


def _alpha(config: OptimizerConfig, beta_1: float, rate: float, step: int) -> np.float32:
    """The size of a step of Adam, as Keras computes it."""
    f = np.float32
    power_1, power_2 = f(beta_1) ** f(step), f(config.beta_2) ** f(step)
    return f(f(rate) * np.sqrt(f(1) - power_2) / (f(1) - power_1))


def _segments(config: OptimizerConfig, offset: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """The local range in order, as (low, high, whether weight decay applies)."""
    position = 0
    if config.weight_decay:
        for start, stop in sorted(config.no_decay):
            low, high = max(position, start - offset), min(size, stop - offset)
            if low < high:
                if position < low:
                    yield position, low, True
                yield low, high, False
                position = high
    if position < size:
        yield position, size, True
