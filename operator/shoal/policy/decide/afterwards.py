"""What is done about a finished job: cleanPodPolicy, its Services and budget given back, ttlSecondsAfterFinished."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from shoal.policy.actions import Action, DeleteJob
from shoal.policy.decide import cleanup
from shoal.policy.decide.queueing import finish_workload
from shoal.policy.facts.read import Facts


@dataclass(frozen=True)
class CleanUp:
    """The clean-up of a finished job."""

    pods: list[Action]
    """Deletions of pods by cleanPodPolicy."""
    others: list[Action]
    released: bool
    """Nothing is left to be given back."""


def clean_up(facts: Facts) -> CleanUp:
    """What is still to be cleaned up."""
    pods, rest = cleanup.at_the_end(facts), cleanup.give_back(facts)
    servers_run = any(each.pod is not None and not each.pod.ended for each in facts.sightings["ps"])
    return CleanUp(
        pods,
        [*rest, *cleanup.stuck(facts), *finish_workload(facts), *_expired(facts)],
        released=not (pods or rest or servers_run),
    )


def _expired(facts: Facts) -> list[Action]:
    job = facts.job
    ttl, end = job.spec.run_policy.ttl_seconds_after_finished, job.status.completion_time
    if ttl is None or end is None or facts.timers.pending(end + timedelta(seconds=ttl)):
        return []
    return [DeleteJob(job.metadata.name, job.metadata.uid, job.metadata.resource_version)]
