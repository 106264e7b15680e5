"""The optimizer of one shard: its state, and the kernels that update each part of the shard.

The state is that of Keras' optimizers: one vector for momentum or Lion, two for Adam. A push's weight (samples,
staleness) multiplies the learning rate, not the gradient, so momentum and second moments keep their scale.

A worker's next gradient arrives some updates after its parameters were read. So an answer may have the parameters
`ahead` updates later, as far as the optimizer's velocity tells (arXiv 1907.11612): the gradient is computed where it
will be applied. An optimizer without velocity (SGD and RMSprop without momentum, Adagrad) answers with its parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shoal_trainer.ps import kernels, lookahead
from shoal_trainer.ps.agreement import SAMPLE
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.kernels import Buffer, Vector
from shoal_trainer.ps.pieces import Payload, parts
from shoal_trainer.ps.spans import cut
from shoal_trainer.wire.messages import OptimizerConfig

STATE = {
    "sgd": (),
    "momentum": ("momentum",),
    "adam": ("m", "v"),
    "adamw": ("m", "v"),
    "nadam": ("m", "v"),
    "lion": ("m",),
    "rmsprop": ("v",),
    "rmsprop with momentum": ("momentum", "v"),
    "adagrad": ("a",),
    "delta": (),
}


class Update(NamedTuple):
    """The learning rate of one push, the optimizer's step (from 1), and the `pace` of `Damping`.

    `ahead`: by how many updates the answer anticipates; `next_rate`: their learning rate (nan: `rate`). `before`: the
    pace at which the velocity was made. `filled`: of Adam's first moment before this update (nan: all at this pace).
    """

    rate: float
    step: int
    pace: float = 1.0
    ahead: float = 0.0
    next_rate: float = math.nan
    before: float = 1.0
    filled: float = math.nan

    @property
    def later(self) -> float:
        """The learning rate of the update after this one."""
        return self.rate if math.isnan(self.next_rate) else self.next_rate


class Optimizer:
    """The optimizer `config` for `size` trainable values from `offset` of the flat vector.

    `kept`: existing state to continue with, by name, each of shape (size,).
    """

    def __init__(
        self, config: OptimizerConfig, offset: int, size: int, kept: Mapping[str, Vector] | None = None
    ) -> None:
        self.config = config
        self.size = size
        self.state: dict[str, Vector] = {name: aligned(size) for name in STATE[rule(config)]}
        if config.name == "adagrad":
            self.state["a"].fill(config.initial_accumulator_value)
        for name, values in (kept or {}).items():
            if name in self.state:
                self.state[name][:] = values
        self._segments = tuple(_segments(config, offset, size))

    def apply(self, w: Vector, io: Payload, update: Update | None) -> bool:
        """Apply the gradient in the first `size` values of `io` to `w`, and write the new parameters to `io`.

        `io` may have only some of the values, and threads may apply other parts at the same time: rules go value by
        value, and what they need of a whole gradient is in `update`; None: it is no gradient. Returns whether the
        gradient had non-finite values (replaced by 0).
        """
        if update is None:
            for part, values in parts(io, 0, self.size):
                kernels.encode(w[part], values)
            return False
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
                lookahead.glide(w[part], state["momentum"], values, f(ahead))
            elif update.ahead and c.name == "lion":
                lookahead.glide_lion(w[part], state["m"], values, f(update.ahead * update.rate))
            elif update.ahead and "m" in state and update.step > 1:
                beta = adam_momentum(c, update.pace)
                glide = _glide_adam(c, beta, update.rate, update.step, _filled(update, beta))
                ahead = update.ahead * beta * glide
                lookahead.glide_adam(w[part], state["m"], state["v"], values, f(ahead), f(c.epsilon))
            else:
                kernels.encode(w[part], values)

    def agreement(self, step: int, pace: float, filled: float) -> float:
        """How far the gradients up to `step` agree, from 0 (noise) to 1, by Adam's moments; 0 without these.

        It is m² / v, the mean over a sample of the values, less what m² / v is of independent gradients. `pace`: at
        which m was made; `filled`: see `fill`.
        """
        beta = adam_momentum(self.config, pace)
        if step < 2 or not self.size or beta <= 0 or not {"m", "v"} <= self.state.keys():
            return 0.0
        stride = -(-self.size // SAMPLE)
        m, v = (self.state[name][::stride].astype(np.float64) for name in ("m", "v"))
        noise = (1 - beta) / (1 + beta) * (2 - filled) / filled
        with np.errstate(all="ignore"):  # a run that diverges is answered, too
            squares = np.divide(m * m, v, out=np.zeros_like(m), where=v > 0)
        found = float(squares.mean()) * (1 - self.config.beta_2**step) / filled**2
        return min(1.0, max(0.0, (found - noise) / (1 - noise)))

    def _apply(self, part: slice, w: Vector, io: Buffer, update: Update, decays: bool) -> bool:
        c, f = self.config, np.float32
        rate = f(update.rate)
        decay = f(update.rate * c.weight_decay if decays else 0.0)
        state = {name: values[part] for name, values in self.state.items()}
        if "m" in state:
            return self._moments(w, state, io, update, rate, decay)
        if "momentum" in state:
            return self._momentum(w, state, io, update, decay)
        if c.name == "rmsprop":
            return kernels.rmsprop(w, state["v"], io, rate, decay, f(c.rho), f(1 - c.rho), f(c.epsilon))
        if c.name == "adagrad":
            return kernels.adagrad(w, state["a"], io, rate, decay, f(c.epsilon))
        if c.name == "delta":  # the step of a worker-side optimizer
            return kernels.add(w, io, rate)
        return kernels.sgd(w, io, rate, decay)

    def _momentum(
        self, w: Vector, state: Mapping[str, Vector], io: Buffer, update: Update, decay: np.float32
    ) -> bool:
        c, f = self.config, np.float32
        # Velocity that was made at another pace still has to go as far as it would have gone there.
        slower = stretch(update.pace)
        kept, rate = (
            f(momentum_at(c, update.before) * stretch(update.before) / slower),
            f(update.rate / slower),
        )
        ahead = f(update.ahead * _glide(c, update.pace))
        if c.name == "rmsprop":
            second = f(c.rho), f(1 - c.rho), f(c.epsilon)
            return kernels.rmsprop_momentum(
                w, state["momentum"], state["v"], io, rate, decay, kept, *second, ahead
            )
        rule = kernels.nesterov if c.nesterov else kernels.momentum
        return rule(w, state["momentum"], io, rate, decay, kept, ahead)

    def _moments(
        self,
        w: Vector,
        state: Mapping[str, Vector],
        io: Buffer,
        update: Update,
        rate: np.float32,
        decay: np.float32,
    ) -> bool:
        """Adam, AdamW, Nadam, Lion."""
        c, f, step = self.config, np.float32, update.step
        beta = adam_momentum(c, update.pace)
        filled = _filled(update, beta)
        if c.name == "lion":
            b1, b2 = (f(beta), f(1) - f(beta)), (f(c.beta_2), f(1) - f(c.beta_2))
            return kernels.lion(w, state["m"], io, rate, decay, *b1, *b2, f(update.ahead * update.later))
        new = f(1 - beta), f(1 - c.beta_2)
        if c.name == "nadam":
            of_m, of_g = nadam_parts(beta, update.rate, step, filled)
            bias = f(1) - f(c.beta_2) ** f(step)
            ahead = update.ahead * beta * nadam_parts(beta, update.later, step + 1, fill(filled, beta))[0]
            ahead *= math.sqrt((1 - c.beta_2 ** (step + 1)) / (1 - c.beta_2**step))
            return kernels.nadam(
                w, state["m"], state["v"], io, f(of_m), f(of_g), decay, *new, bias, f(c.epsilon), f(ahead)
            )
        alpha = _alpha(c, update.rate, step, filled)
        ahead = update.ahead * beta
        if ahead and alpha:
            ahead *= float(_alpha(c, update.later, step + 1, fill(filled, beta)) / alpha)
        return kernels.adam(w, state["m"], state["v"], io, alpha, decay, *new, f(c.epsilon), f(ahead))


def free_pace(config: OptimizerConfig) -> float:
    """See `Damping`: 4 is that of nine workers in rounds, and 2.5 that of six."""
    if rule(config) == "sgd" or (config.name == "delta" and not config.normalized):
        return 1.0
    return 4.0 if {"m", "momentum"} & set(STATE[rule(config)]) else 2.5


def divides_by_size(config: OptimizerConfig) -> bool:
    """Whether its steps do not shrink with its gradients: all but SGD."""
    return config.normalized if config.name == "delta" else config.name != "sgd"


def stretch(pace: float) -> float:
    """By how much SGD's momentum lasts longer at a normal staleness of `pace`, at a rate that is as much lower."""
    return float(pace**1.25)


def momentum_at(config: OptimizerConfig, pace: float) -> float:
    """The momentum of SGD at a normal staleness of `pace`."""
    return config.momentum if pace == 1 else 1 - (1 - config.momentum) / stretch(pace)


def adam_momentum(config: OptimizerConfig, pace: float) -> float:
    """Adam's beta_1 at a normal staleness of `pace`."""
    return config.beta_1 if pace == 1 else 1 - (1 - config.beta_1) / pace**0.75


def fill(filled: float, beta_1: float) -> float:
    """How much of Adam's first moment is gradients after one more, when it was `filled`: the sum of their weights.

    At one pace it is Keras' 1 - beta_1**step. A beta_1 that has grown since has not taken away from the gradients of
    before: if the moment were divided by what that formula says then, steps would be many times as long.
    """
    return beta_1 * filled + (1 - beta_1)


def filled_by(beta_1: float, updates: int) -> float:
    """The same after so many updates at one beta_1."""
    return float(1 - beta_1**updates)


def _filled(update: Update, beta_1: float) -> float:
    """The same after `update`."""
    return filled_by(beta_1, update.step) if math.isnan(update.filled) else fill(update.filled, beta_1)


def nadam_parts(beta_1: float, rate: float, step: int, filled: float) -> tuple[float, float]:
    """How far step `step` of Nadam moves along the first moment, `filled` with its gradient, and along the latter."""
    now, later = (beta_1 * (1 - 0.5 * 0.96**at) for at in (step, step + 1))
    product = (1 - filled) * _nadam_delay(step)
    return rate * later / (1 - product * later), rate * (1 - now) / (1 - product)


def _nadam_delay(step: int) -> float:
    """The product of Nadam's momenta up to `step`, over that of their beta_1, which they are from 1,000 on."""
    return float(np.prod(1 - 0.5 * 0.96 ** np.arange(1.0, min(step, 1000) + 1)))


def rule(config: OptimizerConfig) -> str:
    """The key of `STATE`."""
    if config.momentum and config.name == "sgd":
        return "momentum"
    return "rmsprop with momentum" if config.momentum and config.name == "rmsprop" else config.name


def _glide_adam(config: OptimizerConfig, beta_1: float, rate: float, step: int, filled: float) -> float:
    """How far step `step` of Adam or Nadam moves along m / √v, without its gradient."""
    if config.name == "nadam":
        power = 1 - config.beta_2**step
        return float(nadam_parts(beta_1, rate, step, filled)[0] * math.sqrt(power))
    return float(_alpha(config, rate, step, filled))


def _glide(config: OptimizerConfig, pace: float) -> float:
    """How far SGD's velocity moves the parameters in the next step, without its gradient."""
    mu = momentum_at(config, pace)
    return mu * mu if config.nesterov else mu


def _alpha(config: OptimizerConfig, rate: float, step: int, filled: float) -> np.float32:
    """The size of a step of Adam, as Keras computes it."""
    f = np.float32
    return f(f(rate) * np.sqrt(f(1) - f(config.beta_2) ** f(step)) / f(filled))


def _segments(config: OptimizerConfig, offset: int, size: int) -> Iterator[tuple[int, int, bool]]:
    """The local range in order, as (low, high, whether weight decay applies)."""
    without = (
        (start - offset, stop - offset, False) for start, stop in config.no_decay if config.weight_decay
    )
    return ((low, high, decays is None) for low, high, decays in cut(without, 0, size))
