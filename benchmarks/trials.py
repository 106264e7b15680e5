"""Rules that were tried in place of the servers' own, on the same shard: docs/benchmarks/tried.md and bounds.md."""

from __future__ import annotations

import heapq
import math

import numpy as np

from benchmarks.networks import Vector
from benchmarks.tasks import BATCH
from benchmarks.virtual_job import Asynchronous, Job, VirtualJob
from shoal_trainer.ps import schedules
from shoal_trainer.ps.damping import Damped, Damping
from shoal_trainer.ps.shard import EXPONENTS, ShardStore
from shoal_trainer.ps.update_rules import Update

STEP_SMOOTHING = 0.05
WARM_ROUNDS = 5


class Trial(Damping):
    """The default, but that it is told of each push before it is applied."""

    def meets(self, computed_on: Vector, current: Vector) -> None:
        """A gradient arrives: the parameters it was computed on, and those that it meets."""


class Tried(VirtualJob):
    """Shoal with another damping on its server."""

    def __init__(self, job: Job, damping: type[Trial] = Trial) -> None:
        self._damping = damping
        super().__init__(job)

    def _server(self, epoch: int) -> ShardStore:
        shard = super()._server(epoch)
        shard.damping = self._damping(EXPONENTS[self.job.policy])
        return shard

    def update(self, worker: int, flat: Vector, samples: int = 0) -> Vector:
        """What a worker pushes, of which the damping is told."""
        found = super().update(worker, flat, samples)
        damping, model = self.shard.damping, self.shard.model
        assert isinstance(damping, Trial)
        assert model is not None
        damping.meets(flat, model.parameters)
        return found


class Pace(Trial):
    """SGD's rate over √pace, however far gradients agree: the default before."""

    def rate(self, pace: float) -> float:
        """See `Damping`."""
        return float(pace**-self.exponent)


class FromTwo(Trial):
    """The default, but that the agreement counts from two workers on, by the mean staleness."""

    def rate(self, pace: float) -> float:
        """See `Damping`."""
        return float(max(1 + 2 * self.staleness * self.agreement, pace / self.free) ** -self.exponent)


class Gap(Trial):
    """Gap-Aware (Barkai et al., arXiv 1909.10802): the rate over 1 + |w now - w computed on| / usual step."""

    _gap = 1.0
    _usual = 0.0
    _before: Vector | None = None

    def meets(self, computed_on: Vector, current: Vector) -> None:
        """See `Trial`."""
        if self._before is not None:
            step = float(np.linalg.norm(current - self._before))
            self._usual += (STEP_SMOOTHING if self._usual else 1.0) * (step - self._usual)
        self._before = current.copy()
        far = float(np.linalg.norm(current - computed_on))
        self._gap = 1 + far / self._usual if self._usual > 0 else 1.0

    def rate(self, pace: float) -> float:  # noqa: ARG002
        """See `Damping`: the gap counts in place of it."""
        return 1 / self._gap

    def apply(self, staleness: int, live_workers: int, length: float = math.nan) -> Damped:
        """See `Damping`: how much staler than normal counts no more, either."""
        damped = super().apply(staleness, live_workers, length)
        return Damped(damped.factor / min(1.0, damped.pace / max(1, staleness)), damped.pace)


class GapAlone(Gap):
    """The same as published, with the momentum as it is configured, and gradients that are never shortened."""

    def apply(self, staleness: int, live_workers: int, length: float = math.nan) -> Damped:  # noqa: ARG002
        """See `Damping`."""
        return Damped(super().apply(staleness, live_workers).factor, 1.0)


class WarmUp(Trial):
    """The default, with a rate that rises over the first rounds after the number of workers grew."""

    _live = 0
    _since = math.inf

    def apply(self, staleness: int, live_workers: int, length: float = math.nan) -> Damped:
        """See `Damping`."""
        if live_workers > self._live:
            self._since = 0
        self._live = live_workers
        self._since += 1
        damped = super().apply(staleness, live_workers, length)
        return Damped(damped.factor * min(1.0, self._since / (WARM_ROUNDS * live_workers)), damped.pace)


class Joined(Tried):
    """One worker for half of the samples; then the others join at once."""

    def __init__(self, job: Job, damping: type[Trial] = Trial) -> None:
        super().__init__(job, damping)
        self.shrink(1)

    def advance(self) -> None:
        """See `VirtualJob`."""
        workers = self.job.workers
        if self.shard.workers.live < workers and self.samples >= self.updates * BATCH / 2:
            self.shard.workers.set_live(workers)
            for worker in range(1, workers):
                self._join(worker)
        super().advance()


class Accumulating(Asynchronous):
    """As many gradients as there are workers are one step of Keras, of their mean; nobody waits for it."""

    def __init__(self, job: Job) -> None:
        super().__init__(job)
        self._sum, self._held = np.zeros_like(self.first), 0

    def advance(self) -> None:
        """One step of one worker."""
        self.now, worker = heapq.heappop(self._queue)
        self._sum += self.update(worker, self._computing[worker])
        self._held += 1
        self.samples += self.job.batch
        if self._held == self.job.workers:
            rate = schedules.learning_rate(
                self.config.learning_rate, self.config.step_after(self.samples - self._held * self.job.batch)
            )
            self._steps += 1
            mean = (self._sum / self._held).astype(np.float32)
            self._optimizer.apply(self._parameters, mean, Update(rate, self._steps))
            self._sum[:], self._held = 0, 0
        self._computing[worker] = self._parameters.copy()
        heapq.heappush(self._queue, (self.now + self.step_seconds(worker), worker))
