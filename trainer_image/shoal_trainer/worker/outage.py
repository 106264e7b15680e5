"""What a worker does while a parameter server is away: it trains on, alone, and never exits because of it.

It keeps an fp32 master of the last parameters and takes local steps with a fresh optimizer of the same kind, up to a
cap in steps and seconds, then waits. When the servers are back, the difference that its local steps made is pushed,
divided by the number of active workers: together they move as far as one (local SGD; dividing by less diverges).

The push that was cut off is no part of that difference. It is sent again as it was: a server that had applied it
answers without applying it twice, a server that came back older applies it now.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.optimizers import Optimizer, Update
from shoal_trainer.wire.messages import OptimizerConfig, Progress, Push
from shoal_trainer.worker.leases import joined
from shoal_trainer.worker.send import Send

MAX_STEPS = 64
"""Fewer than the marks that a push can carry. A pile that could not be sent has no more of those, and ends them."""
MAX_SECONDS = 60.0


class Outage:
    """The local state between the first `Unreachable` and the first answer.

    `current`: the last parameters that were pulled, in fp32 or bf16, shape (size,); of them the first `parameters` are
    trainable, the rest statistics. `learning_rate`: the one that the servers used last.
    """

    def __init__(
        self,
        current: npt.NDArray[Any],
        config: OptimizerConfig,
        parameters: int,
        learning_rate: float,
        clock: Callable[[], float],
        *,
        max_steps: int = MAX_STEPS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        self.steps = 0
        self.samples = 0
        self.progress: list[Progress] = []
        self.master = aligned(current.size)
        kernels.decode(current, self.master)
        self.base = self.master.copy()
        self._rule = None if config.name == "delta" else Optimizer(config, 0, parameters)
        self._parameters = 0 if config.name == "delta" else parameters
        self._learning_rate = learning_rate
        self._config = config
        self._updates = 0
        self._scratch = aligned(0)
        self._clock = clock
        self._started = clock()
        self._max_steps, self._max_seconds = max_steps, max_seconds

    @property
    def exhausted(self) -> bool:
        """Whether local training has gone as far as it may; then the worker waits."""
        return self.steps >= self._max_steps or self._clock() - self._started >= self._max_seconds

    def absorb(self, update: npt.NDArray[Any], samples: int, *, gradient: bool = True) -> None:
        """Take in a step that is pushed by other means: it moves the master and the base alike."""
        self._apply(update, samples, gradient)
        self.base[:] = self.master

    def step(
        self, update: npt.NDArray[Any], samples: int, progress: Progress, *, gradient: bool = True
    ) -> None:
        """One local step by `update`, as the wire carries it: gradients, then differences of the statistics.

        `gradient`: whether there is one; without, the optimizer is skipped.
        """
        self._apply(update, samples, gradient)
        self.steps += 1
        self.samples += samples
        self.progress.append(progress)

    def parameters_into(self, out: npt.NDArray[Any]) -> None:
        """The local parameters, in the encoding of `out`."""
        kernels.encode(self.master, out)

    def difference_into(self, out: npt.NDArray[Any]) -> None:
        """What the local steps changed, in the encoding of `out`."""
        kernels.encode(self.master - self.base, out)

    def taken(self) -> None:
        """What the local steps made is pushed by other means now: the next difference begins here."""
        self.base[:] = self.master
        self.steps = self.samples = 0
        self.progress = []

    def as_send(self, seq: int, versions: tuple[int, ...]) -> Send:
        """The local steps as something to send; from now on they count as sent by other means."""
        delta = aligned(self.master.size, self._scratch.dtype)  # as the updates came
        self.difference_into(delta)
        push = Push(
            seq=seq,
            samples=self.samples,
            base_versions=versions,
            progress=joined(self.progress),
            steps=self.steps,
        )
        self.taken()
        return Send(delta, push, local=True)

    def _apply(self, update: npt.NDArray[Any], samples: int, gradient: bool) -> None:
        if self._scratch.shape != update.shape or self._scratch.dtype != update.dtype:
            self._scratch = aligned(update.size, update.dtype)
        self._scratch[:] = update  # the kernels write the new parameters over what they read
        n = self._parameters
        self._updates += gradient
        if self._rule is not None and gradient:
            rate = self._learning_rate * self._config.weight(samples)  # as the servers have it
            self._rule.apply(self.master[:n], self._scratch[:n], Update(rate, self._updates, 1))
        kernels.add(self.master[n:], self._scratch[n:], np.float32(1.0))
