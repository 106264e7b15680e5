"""What a worker brings to the parameter servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.messages import Push
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.glue import Step


@dataclass(frozen=True)
class Send:
    """Something that the servers must have applied, in order, before anything later."""

    update: npt.NDArray[Any]
    push: Push
    local: bool = False
    """A difference of local steps (to be divided by the number of workers), not a gradient."""


def combined(pile: list[tuple[Step, Ready]], trainable: int) -> tuple[npt.NDArray[Any], int, float]:
    """The mean of the steps' gradients (weighted by samples), their samples, their mean loss.

    Of the statistics, which are behind the first `trainable` values, the sum: each step began where the one before
    had left them (`Glue.advance`).
    """
    if len(pile) == 1:
        step, ready = pile[0]
        return step.update, ready.batch.samples, step.loss
    samples = sum(ready.batch.samples for _, ready in pile)
    first = pile[0][0].update
    total = aligned(first.size)
    scratch = aligned(first.size, first.dtype)
    for step, ready in pile:
        scratch[:] = step.update
        share = np.float32(ready.batch.samples / samples)
        kernels.add(total[:trainable], scratch[:trainable], share)
        kernels.add(total[trainable:], scratch[trainable:], np.float32(1.0))
    kernels.encode(total, scratch)
    return scratch, samples, sum(step.loss * ready.batch.samples for step, ready in pile) / samples
