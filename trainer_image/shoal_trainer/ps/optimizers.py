"""The optimizer of one shard: its state, and the kernels that update each part of the shard.

The state is that of Keras' optimizers: one vector for momentum, two for Adam. A push's weight (samples, staleness)
multiplies the learning rate, not the gradient, so momentum and second moments keep their scale.
"""

from __future__ import annotations

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
    """The learning rate of one push, the optimizer's step (from 1), and the number of live workers."""

    rate: float
    step: int
    live: int


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

        Returns whether the gradient had non-finite values (replaced by 0).
        """
        non_finite = False
        for low, high, decays in self._segments:
            for part, values in parts(io, low, high):
                non_finite |= self._apply(part, w[part], values, update, decays)
        return non_finite

    def _apply(self, part: slice, w: Vector, io: Buffer, update: Update, decays: bool) -> bool:
        c, f = self.config, np.float32
        rate = f(update.rate)
        decay = f(update.rate * c.weight_decay if decays else 0.0)
        state = {name: values[part] for name, values in self.state.items()}
        if c.name in {"adam", "adamw"}:
            power_1, power_2 = f(c.beta_1) ** f(update.step), f(c.beta_2) ** f(update.step)
            alpha = rate * np.sqrt(f(1) - power_2) / (f(1) - power_1)
            low, high = f(1 - c.beta_1), f(1 - c.beta_2)
            return kernels.adam(w, state["m"], state["v"], io, f(alpha), decay, low, high, f(c.epsilon))
        if c.name == "adagrad":
            return kernels.adagrad(w, state["a"], io, rate, decay, f(c.epsilon))
        if c.name == "delta":  # the step of a worker-side optimizer
            return kernels.add(w, io, rate)
        if "momentum" not in state:
            return kernels.sgd(w, io, rate, decay)
        mu = f(explicit_momentum(c, update.live))
        rule = kernels.nesterov if c.nesterov else kernels.momentum
        return rule(w, state["momentum"], io, rate, decay, mu)


def explicit_momentum(config: OptimizerConfig, live: int) -> float:
    """The momentum to apply: asynchrony of W workers already acts like momentum 1 - 1/W (arXiv 1605.09774)."""
    if not config.momentum_correction:
        return config.momentum
    return max(0.0, config.momentum - (1 - 1 / max(1, live)))


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
