"""The numbers of one shard: its range of the parameters, the optimizer, and how a push changes them. It has no lock."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from shoal_trainer.ps import kernels, schedules
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.kernels import Buffer, Vector
from shoal_trainer.ps.layout import bounds
from shoal_trainer.ps.merging import Merger
from shoal_trainer.ps.optimizers import Optimizer, Update, compile_for
from shoal_trainer.wire.messages import ModelSpec, PushMeta


class ModelState:
    """Shard `index` of `shards` of the model `spec`, with parameters 0 and a new optimizer.

    `parameters`: fp32 of shape (high - low,); the trainable values of the range first, then the others. Every update
    takes a buffer `io` of the same shape in fp32 or bf16, writes the new parameters to it, and returns whether it had
    non-finite values (replaced by 0).
    """

    def __init__(self, spec: ModelSpec, index: int, shards: int) -> None:
        self.low, self.high = bounds(spec.size, shards)[index]
        self.parameters: Vector = aligned(self.high - self.low)
        self.updates = 0
        """The number of gradients in the optimizer's state: the step of Adam."""
        self._merger = Merger()
        self._configure(spec, {})

    def reconfigure(self, spec: ModelSpec) -> None:
        """Change to the optimizer of `spec`, a model of the same shapes.

        State with the same name is kept. If the new optimizer needs any other state, its steps start at 0.
        """
        self._configure(spec, self.optimizer.state)

    def arrays(self) -> dict[str, Vector]:
        """Copies of the parameters and of the optimizer's state, by name."""
        arrays = {"parameters": self.parameters} | self.optimizer.state
        return {name: values.copy() for name, values in arrays.items()}

    def load(self, arrays: Mapping[str, Vector]) -> None:
        """Set the parameters to those in `arrays`; no update is merged with them yet."""
        self.parameters[:] = arrays["parameters"]
        self._merger = Merger()

    def load_optimizer(self, arrays: Mapping[str, Vector], updates: int) -> None:
        """Set the optimizer's state to that in `arrays`, which contains `updates` gradients."""
        for name, values in self.optimizer.state.items():
            values[:] = arrays[name]
        self.updates = updates

    def apply_gradient(
        self, io: Buffer, meta: PushMeta, weight: float, tau: int, samples: int, live_workers: int
    ) -> bool:
        """Apply a mean gradient of staleness `tau`; its learning rate is multiplied by `weight`.

        `samples`: how many the shard has seen, for the schedule of a push without its own learning rate.
        """
        optimizer, w = self.optimizer, self.parameters
        rate, trainable = meta.learning_rate, optimizer.size
        if not math.isfinite(rate):
            config = optimizer.config
            rate = schedules.learning_rate(config.learning_rate, config.step_after(samples))
        update = Update(rate * weight, self.updates + 1, live_workers)
        non_finite = optimizer.apply(w[:trainable], io[:trainable], update)
        # Each worker pushes the change of its moving statistics; a stale change is added in part.
        if trainable < w.size:
            non_finite |= kernels.add(w[trainable:], io[trainable:], np.float32(1 / max(1, tau)))
        self.updates += 1
        return non_finite

    def add(self, io: Buffer, scale: float) -> bool:
        """Parameters += `scale` * `io`."""
        return kernels.add(self.parameters, io, np.float32(scale))

    def merge(self, io: Buffer, now: float) -> bool:
        """Combine `io` with earlier updates of the same outage by Adasum; see `Merger`."""
        return self._merger.merge(self.parameters, io, now)

    def _configure(self, spec: ModelSpec, kept: Mapping[str, Vector]) -> None:
        compile_for(spec.optimizer)
        trainable = max(0, min(self.high, spec.parameters) - self.low)
        self.optimizer = Optimizer(spec.optimizer, self.low, trainable, kept)
        if not self.optimizer.state.keys() <= kept.keys():
            self.updates = 0
        self.spec = spec
