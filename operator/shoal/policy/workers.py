"""Workers: each place that is wanted has one pod, and a replacement is there before its predecessor is gone.

A place whose pod is leaving, or silent, gets its replacement beside it, at most `maxSurge` at a time; where there is
no surge left it follows the old pod's end. A pod on a lost machine holds nothing. Of the replacements that find no
room only a bounded number waits, so that neither the scheduler nor an autoscaler is flooded.
"""

from __future__ import annotations

from math import ceil

from shoal.policy.creation import Creator, Decisions
from shoal.policy.incarnations import ByIndex, Incarnation
from shoal.policy.model import Observation

LEAST_WAITING = 16
WAITING_SHARE = 0.25


def max_surge(value: int | str, replicas: int) -> int:
    """`maxSurge` in pods: percentages are of `replicas`, rounded up."""
    if isinstance(value, int):
        return value
    return ceil(int(value.removesuffix("%")) * replicas / 100)


def fill(seen: Observation, workers: ByIndex, decisions: Decisions) -> None:
    """Create the pods that are wanted and not there."""
    spec = seen.job.spec.workers
    creator = Creator(seen, "worker", decisions)
    alive = {index: sum(h.alive for h in of) for index, of in workers.items()}
    surge_left = max_surge(spec.max_surge, spec.replicas) - sum(max(0, n - 1) for n in alive.values())
    waiting_left = max(LEAST_WAITING, int(WAITING_SHARE * spec.replicas)) - sum(
        _waits_again(of) for of in workers.values()
    )
    vacant = [i for i in range(spec.replicas) if not _held(workers.get(i, ()))]
    beside = {i for i in vacant if alive.get(i)}
    for index in sorted(vacant, key=lambda i: i in beside):  # the vacant first: they need no surge
        of = workers.get(index, ())
        if (index in beside and surge_left <= 0) or (of and waiting_left <= 0):
            continue
        if creator.create(index, of) is not None:
            surge_left -= index in beside
            waiting_left -= bool(of)


def _held(of: tuple[Incarnation, ...]) -> bool:
    """There is a pod that needs no replacement, or the worker was told that the work is done."""
    return any((h.staying and h.slot.state != "Silent") or h.awaiting_the_end for h in of)


def _waits_again(of: tuple[Incarnation, ...]) -> bool:
    """The place was filled before, and its newest pod found no room yet."""
    return bool(of) and of[-1].place.incarnation > 0 and of[-1].staying and not of[-1].node
