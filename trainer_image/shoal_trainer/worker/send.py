"""What a worker brings to the parameter servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from shoal_trainer.ps import kernels
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.wire.messages import MAX_MARKS, Push
from shoal_trainer.worker.feed import Ready
from shoal_trainer.worker.flat_model import Step
from shoal_trainer.worker.layout import Average


@dataclass(frozen=True)
class Send:
    """Something that the servers must have applied, in order, before anything later."""

    update: npt.NDArray[Any]
    push: Push
    local: bool = False
    """A difference of local steps (to be divided by the number of workers), not a gradient."""


MOST_AT_ONCE = 0.1
"""The part of the way to what was seen that one push may move a moving average. Pushes of several workers, and the
one before, are under way at the same moment: of greater parts of it they would carry a variance below zero."""


def full(pile: Sequence[tuple[Step, Ready]], most: int) -> bool:
    """Whether a pile is to be sent: it has so many steps, or another one might need more marks than a push can carry.

    Leases that follow each other share a mark; here each is taken to need its own.
    """
    if len(pile) >= most:
        return True
    changes = sum(a.work.token != b.work.token for (_, a), (_, b) in pairwise(pile))
    return changes + 1 >= MAX_MARKS


def combined(
    pile: list[tuple[Step, Ready]], averages: Sequence[Average] = (), behind: int = 1
) -> tuple[npt.NDArray[Any], int, float]:
    """The mean update of the steps (weighted by samples), their samples, their mean loss.

    All steps began with the same statistics, so the mean moves them as one step would. Those of `averages` go as far
    as the steps would have gone one after the other. The servers divide what moves statistics by how many pushes came
    in between (`behind`, as it was of the push before this one), for they do not know how far it goes; here that is
    known, and made up for. Of both no more than `MOST_AT_ONCE` together.
    """
    samples = sum(ready.batch.samples for _, ready in pile)
    loss = sum(step.loss * ready.batch.samples for step, ready in pile) / samples
    update = pile[0][0].update if len(pile) == 1 else _mean(pile, samples)
    for average in averages:
        factor = np.float32(_further(average, len(pile), behind))
        if factor != 1:
            if not update.flags.writeable:  # TensorFlow's own memory
                update = update.copy()
            part = update[average.low : average.high]
            values = aligned(part.size)
            kernels.decode(part, values)
            values *= factor
            kernels.encode(values, part)
    return update, samples, loss


def _mean(pile: list[tuple[Step, Ready]], samples: int) -> npt.NDArray[Any]:
    first = pile[0][0].update
    total = aligned(first.size)
    scratch = aligned(first.size, first.dtype)
    for step, ready in pile:
        scratch[:] = step.update
        kernels.add(total, scratch, np.float32(ready.batch.samples / samples))
    kernels.encode(total, scratch)
    return scratch


def _further(average: Average, steps: int, behind: int) -> float:
    """How many times as far as one step's difference a push is to move an average."""
    alone = 1 - average.momentum
    return min(behind * (1 - average.momentum**steps), max(alone, MOST_AT_ONCE)) / alone
