"""The plan for one job: an observation in, actions, status and events out.

It goes through three rooms, once and in one direction: the observation is read into facts (`facts`), decisions follow
from the facts (`decide`), and both are told in the status and in events (`tell`).

Pure: no clock, no I/O, no memory. The same observation always gives the same plan, and the observation after a plan was
carried out gives an empty one.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.policy.actions import CreatePod
from shoal.policy.decide.afterwards import clean_up
from shoal.policy.decide.cleanup import stuck
from shoal.policy.decide.decide import decide
from shoal.policy.facts.read import read
from shoal.policy.facts.sightings import Memory
from shoal.policy.model import Observation, Plan
from shoal.policy.tell.tell import tell
from shoal.policy.tell.the_end import tell_afterwards


def plan(seen: Observation, memory: Memory | None = None) -> Plan:
    """What to do about a job, and its new status.

    `memory`: of earlier plans of the same job. It saves work, so that a plan costs what changed, and changes nothing.
    """
    job, memory = seen.job, memory or Memory()
    if (images := job.status.images) is not None:  # a newer operator must not mix versions within a job
        gpu = images.worker_gpu or seen.images.worker_gpu
        kept = replace(seen.images, ps=images.ps, worker=images.worker, worker_gpu=gpu)
        seen = replace(seen, images=kept)
    facts = read(seen, memory)
    if job.metadata.deletion_timestamp:
        return Plan(tuple(stuck(facts)), job.status, wake_after=facts.timers.next_seconds)
    if job.status.finished:
        facts.rouse(facts.at_rest.by_index())
        return tell_afterwards(facts, clean_up(facts))
    decided = decide(facts)
    makes = any(isinstance(each, CreatePod) for each in decided.actions.actions)
    memory.keep_pods(facts.pods if makes else None)
    return tell(facts, decided)
