"""Workers: each wanted slot has one pod, and a replacement starts before its predecessor ends.

A slot whose pod is draining or silent gets its replacement at once, at most `maxSurge` at a time; beyond that the
replacement follows the end of the old pod. A pod on a lost node does not occupy its slot. Only a bounded number of
replacements may be unscheduled, so that neither the scheduler nor an autoscaler is flooded.
"""

from __future__ import annotations

from math import ceil

from shoal.policy.creation import Creator, Decisions
from shoal.policy.incarnations import ByIndex, Incarnation
from shoal.policy.model import Observation

MIN_UNSCHEDULED = 16
UNSCHEDULED_SHARE = 0.25


def max_surge(value: int | str, replicas: int) -> int:
    """`maxSurge` in pods: percentages are of `replicas`, rounded up."""
    if isinstance(value, int):
        return value
    return ceil(int(value.removesuffix("%")) * replicas / 100)


def create_workers(seen: Observation, workers: ByIndex, decisions: Decisions) -> None:
    """Create the missing pods."""
    spec = seen.job.spec.workers
    creator = Creator(seen, "worker", decisions)
    timers = decisions.timers
    alive = {index: sum(each.may_run(timers) for each in group) for index, group in workers.items()}
    surge_left = max_surge(spec.max_surge, spec.replicas) - sum(max(0, n - 1) for n in alive.values())
    unscheduled_left = max(MIN_UNSCHEDULED, int(UNSCHEDULED_SHARE * spec.replicas)) - sum(
        _is_unscheduled_replacement(group) for group in workers.values()
    )
    vacant = [index for index in range(spec.replicas) if not _occupied(workers.get(index, ()))]
    needs_surge = {index for index in vacant if alive.get(index)}
    for index in sorted(vacant, key=lambda index: index in needs_surge):
        group = workers.get(index, ())
        if (index in needs_surge and surge_left <= 0) or (group and unscheduled_left <= 0):
            continue
        if creator.create(index, group) is not None:
            surge_left -= index in needs_surge
            unscheduled_left -= bool(group)


def _occupied(group: tuple[Incarnation, ...]) -> bool:
    """Whether the slot has a pod that needs no replacement, or its worker exited because the work is done."""
    return any((each.active and each.slot.state != "Silent") or each.awaiting_job_end for each in group)


def _is_unscheduled_replacement(group: tuple[Incarnation, ...]) -> bool:
    return bool(group) and group[-1].place.incarnation > 0 and group[-1].active and not group[-1].node
