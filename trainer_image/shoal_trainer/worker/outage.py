"""Local training while a parameter server is unreachable.

The worker takes local steps on an fp32 copy of the last parameters, with a fresh optimizer of the same kind, up to a
limit of steps and seconds, then waits. Afterwards it pushes the difference divided by the number of active workers
(local SGD; a smaller divisor diverges).

The interrupted push is not part of that difference. It is sent again unchanged, and servers that have applied it do not
apply it twice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy.typing as npt

from shoal_trainer.ps.aligned import aligned
from shoal_trainer.ps.coding import coded, decode, encode, values
from shoal_trainer.ps.statistics import Statistics
from shoal_trainer.ps.update_rules import Optimizer, Update
from shoal_trainer.wire.messages import Average, OptimizerConfig, Progress, Push, PushMeta
from shoal_trainer.worker.leases import joined
from shoal_trainer.worker.send import Send

MAX_STEPS = 64
"""Less than the marks of a push. Steps that were pending at the start of the outage may exceed it."""
MAX_SECONDS = 60.0


class Outage:
    """The state of local training, from the first `Unreachable` to the first answer.

    `current`: the last pulled parameters, coded (`ps/coding`); the first `parameters` are trainable, the rest are
    statistics. `learning_rate`: that of a push when it begins.
    """

    def __init__(
        self,
        current: npt.NDArray[Any],
        config: OptimizerConfig,
        parameters: int,
        learning_rate: float,
        clock: Callable[[], float],
        *,
        averages: Sequence[Average] = (),
        max_steps: int = MAX_STEPS,
    ) -> None:
        self.steps = 0
        self.samples = 0
        self.left_out = 0
        self.progress: list[Progress] = []
        size = values(current, parameters).size
        self.master = aligned(size)
        decode(current, self.master, parameters)
        self.base = self.master.copy()
        self._rule = Optimizer(config, 0, parameters)
        self._statistics = Statistics(averages, parameters, size)
        self._parameters = parameters
        self._learning_rate = learning_rate
        self._config = config
        self._updates = 0
        self._scratch = aligned(0)
        self._clock = clock
        self._started = clock()
        self._max_steps = max_steps

    @property
    def exhausted(self) -> bool:
        """Whether local training has reached its limit; then the worker waits."""
        return self.steps >= self._max_steps or self._clock() - self._started >= MAX_SECONDS

    def absorb(self, send: Send) -> None:
        """Apply a push that is sent separately: it is not part of the difference."""
        meta = send.push.meta
        self._apply(send.update, meta.samples, meta.steps, gradient=not meta.skipped)
        self.base[:] = self.master

    def step(
        self,
        update: Any,
        samples: int,
        progress: Sequence[Progress],
        *,
        gradient: bool = True,
        left_out: int = 0,
    ) -> None:
        """Take a local step. `update` as coded on the wire.

        `progress`: the mark of each step of which the update is the mean.

        `gradient` False: the step was skipped, and the optimizer does not run. `left_out`: samples without a gradient.
        """
        self._apply(update, samples, len(progress), gradient)
        self.steps += len(progress)
        self.samples += samples
        self.left_out += left_out
        self.progress += progress

    def parameters_into(self, out: npt.NDArray[Any]) -> None:
        """Write the local parameters, coded as `out` is."""
        encode(self.master, out, self._parameters)

    def difference_into(self, out: npt.NDArray[Any]) -> None:
        """Write the difference made by the local steps, coded as `out` is."""
        encode(self.master - self.base, out, self._parameters)

    def rebase(self) -> None:
        """Start the next difference at the current parameters."""
        self.base[:] = self.master
        self.steps = self.samples = self.left_out = 0
        self.progress = []

    def as_send(self, seq: int, versions: tuple[int, ...]) -> Send:
        """The local steps as a push; the next difference starts after them."""
        delta = coded(self.master.size, self._parameters, self._scratch.dtype)  # the dtype of the updates
        self.difference_into(delta)
        meta = PushMeta(self.samples, self.steps, progress=joined(self.progress), left_out=self.left_out)
        self.rebase()
        return Send(delta, Push(seq, versions, meta), local=True)

    def _apply(self, update: Any, samples: int, steps: int, gradient: bool) -> None:
        if self._scratch.shape != update.shape or self._scratch.dtype != update.dtype:
            self._scratch = aligned(update.size, update.dtype)
        self._scratch[:] = update  # the kernels overwrite their input
        n = self._parameters
        self._updates += gradient
        if gradient:
            weight = self._learning_rate * self._config.weight(samples)  # as on the servers
            rate = 1.0 if self._config.name == "delta" else weight
            self._rule.apply(self.master[:n], self._scratch[:n], Update(rate, self._updates))
        self._statistics.apply(self.master, values(self._scratch, n), steps, 1.0)
