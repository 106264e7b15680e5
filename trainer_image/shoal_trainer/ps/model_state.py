"""The numbers of one shard: its range of the parameters, the optimizer, and how a push changes them. It has no lock."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

import numpy as np

from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.agreement import Agreement, Doubles
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import place
from shoal_trainer.ps.kernels import Vector
from shoal_trainer.ps.pieces import Payload, parts
from shoal_trainer.ps.shard_bounds import bounds
from shoal_trainer.ps.statistics import Statistics
from shoal_trainer.ps.update_rules import Optimizer, Update, adam_momentum, fill, filled_by, rule
from shoal_trainer.wire.header import Codec
from shoal_trainer.wire.messages import ModelSpec, PushMeta

log = logging.getLogger(__name__)


class ModelState:
    """Shard `index` of `shards` of the model `spec`, with parameters 0 and a new optimizer.

    `parameters`: fp32 of shape (high - low,); the trainable values of the range first, then the others. Every update
    takes a payload `io` of the same shape in fp32 or bf16, writes the new parameters to it, and returns whether it had
    non-finite values (replaced by 0).
    """

    def __init__(self, spec: ModelSpec, index: int, shards: int) -> None:
        self.low, self.high = bounds(spec.size, shards)[index]
        self.parameters: Vector = aligned(self.high - self.low)
        self.updates = 0
        """The number of gradients in the optimizer's state, or begun: the step of Adam."""
        self.pace: float | None = None
        """The pace at which the velocity was made; None: unknown, so it is taken to be that of the next gradient."""
        self.filled = 0.0
        """How much of Adam's first moment is gradients; see `fill`."""
        self._told: float | None = None
        """The learning rate that the last gradient came with; None: that of the optimizer."""
        self._configure(spec, {})

    @property
    def trainable(self) -> int:
        """How many of its values are trainable."""
        return self.optimizer.size

    @property
    def nbytes(self) -> int:
        """The bytes of the parameters and of the optimizer's state."""
        return int(self.parameters.nbytes) + sum(
            int(values.nbytes) for values in self.optimizer.state.values()
        )

    def coded_bytes(self, codec: Codec, low: int, high: int) -> int:
        """The bytes of the values [low, high) in a message."""
        trainable = max(0, self.trainable - low)
        return place(high - low, trainable, codec.dtype) * codec.itemsize

    def reconfigure(self, spec: ModelSpec) -> None:
        """Change to the optimizer of `spec`, a model of the same shapes, whose state is kept if it is of the same kind.

        What another one calls the same is something else: SGD's velocity has the learning rate in it, and RMSprop's has
        not. Adam's, AdamW's and Nadam's moments are the same. If the new optimizer needs any other state, its steps
        start at 0.
        """
        old, new = self.spec.optimizer.name, spec.optimizer.name
        kept = old == new or {old, new} <= {"adam", "adamw", "nadam"}
        if self.updates and self.optimizer.state and not kept:
            log.warning("the state of %s is dropped: this run continues with %s, which begins anew", old, new)
        self._configure(spec, self.optimizer.state if kept else {})

    def arrays(self) -> dict[str, Vector]:
        """The parameters and the optimizer's state, by name."""
        return {"parameters": self.parameters} | self.optimizer.state

    def load(self, arrays: Mapping[str, Vector]) -> None:
        """Set the parameters to those in `arrays`."""
        self.parameters[:] = arrays["parameters"]

    def load_optimizer(
        self,
        arrays: Mapping[str, Vector],
        updates: int,
        pace: float | None,
        agreement: float,
        filled: float | None,
    ) -> None:
        """Set the optimizer's state to that in `arrays`, which contains `updates` gradients. See `pace`.

        `filled`: see there; None: unknown, so the moments are taken to be made at this pace.
        """
        for name, values in self.optimizer.state.items():
            values[:] = arrays[name]
        self.updates, self.pace = updates, pace
        beta = adam_momentum(self.optimizer.config, pace or 1.0)
        self.filled = filled_by(beta, updates) if filled is None else filled
        self.sampled = Agreement(self.trainable, agreement)

    def encode(self, io: Payload) -> None:
        """Write the parameters to `io`."""
        for part, values in parts(io):
            kernels.encode(self.parameters[part], values)

    def anticipate(self, io: Payload, ahead: float, weight: float, pace: float, samples: int) -> None:
        """Write the parameters expected `ahead` updates of this weight later to `io`; see `Damping` for `pace`."""
        optimizer, rate = self.optimizer, self._last_rate(samples)
        before = self.pace or pace
        update = Update(rate * weight, self.updates + 1, pace, ahead, before=before, filled=self.filled)
        optimizer.anticipate(self.parameters, io, update)
        for part, values in parts(io, optimizer.size):
            kernels.encode(self.parameters[part], values)

    def adopt(self, io: Payload) -> None:
        """Set the parameters to `io`, but keep each more precise value that is rounded to the one in `io`."""
        for part, values in parts(io):
            kernels.adopt(self.parameters[part], values)

    def next_update(self, meta: PushMeta, weight: float, samples: int, pace: float, ahead: float) -> Update:
        """Begin to apply a gradient; its learning rate is multiplied by `weight`.

        `samples`: how many the shard has seen, for the schedule of a push without its own learning rate. `pace`: see
        `Damping`. Its answer has the parameters expected after `ahead` more updates.
        """
        rate, later = self._rates(meta, samples, ahead)
        self._told = meta.learning_rate
        self.updates += 1
        before, self.pace = self.pace or pace, pace
        update = Update(rate * weight, self.updates, pace, ahead, later * weight, before, self.filled)
        self.filled = fill(self.filled, adam_momentum(self.optimizer.config, pace))
        return update

    def agreement(self) -> float:
        """How far the last gradients agree, from 0 (noise) to 1: by Adam's moments, or by samples with momentum."""
        if self._samples:
            return min(1.0, max(0.0, self.sampled.mean))
        return self.optimizer.agreement(self.updates, self.pace or 1.0, self.filled)

    def meet(self, worker: int, io: Payload) -> Doubles:
        """Compare a gradient, or what `io` has of it, with the last one of another worker; see `Agreement`."""
        return self.sampled.meet(worker, io) if self._samples else np.zeros(3)

    def apply_gradient(self, io: Payload, update: Update | None, steps: int, tau: int) -> bool:
        """Apply a mean gradient (None: there is none) of so many steps, or what `io` has of it, of staleness `tau`."""
        non_finite = self.optimizer.apply(self.parameters, io, update)
        return self._statistics.apply(self.parameters, io, steps, 1 / max(1, tau)) or non_finite

    def check_rate(self, meta: PushMeta | None, samples: int, ahead: float) -> None:
        """`UserError` if the schedule cannot be evaluated for a push (None: for a pull) with such an answer."""
        if meta is None:
            if ahead:
                self._last_rate(samples)
        elif not meta.skipped:
            self._rates(meta, samples, ahead)

    def _last_rate(self, samples: int) -> float:
        """The learning rate without a push."""
        return self._rate(samples) if self._told is None else self._told

    def _rates(self, meta: PushMeta, samples: int, ahead: float) -> tuple[float, float]:
        """The learning rate of a gradient, and of the one after it (nan: its answer is not `ahead`)."""
        if meta.learning_rate is not None:
            return meta.learning_rate, meta.learning_rate
        return self._rate(samples), self._rate(samples + meta.samples) if ahead else math.nan

    def _rate(self, samples: int) -> float:
        config = self.optimizer.config
        return schedules.learning_rate(config.learning_rate, config.step_after(samples))

    def add(self, io: Payload, scale: float) -> bool:
        """Parameters += `scale` * `io`."""
        non_finite = False
        for part, values in parts(io):
            non_finite |= kernels.add(self.parameters[part], values, np.float32(scale))
        return non_finite

    def _configure(self, spec: ModelSpec, kept: Mapping[str, Vector]) -> None:
        trainable = max(0, min(self.high, spec.parameters) - self.low)
        self.optimizer = Optimizer(spec.optimizer, self.low, trainable, kept)
        self.sampled, self._samples = Agreement(trainable), rule(spec.optimizer) == "momentum"
        self._statistics = Statistics(spec.averages, trainable, self.high - self.low, self.low)
        if not self.optimizer.state.keys() <= kept.keys():
            self.updates, self.pace, self.filled = 0, None, 0.0
        self.spec = spec
