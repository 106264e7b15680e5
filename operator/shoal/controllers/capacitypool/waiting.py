"""For what the pods of a pool wait that have no node, and since when; and when its last node came."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from shoal.api.kube import Node, Pod
from shoal.api.labels import Place
from shoal.controllers.state import ClusterState
from shoal.policy.facts.waits import ALWAYS, Rooms, Wait, near_since, wait_of
from shoal.runtime.controller import key_of


@dataclass(frozen=True)
class _Job:
    """What is asked of a job for each of its pods."""

    near_since: datetime | None
    made: Mapping[Place, datetime]
    """When its pods were let go by what held them back, such as a queue, or were created."""


def last_came(
    nodes: Iterable[Node], on: Callable[[str], Iterable[Pod]], *, some_wait: bool
) -> datetime | None:
    """When the last of these machines became Ready that took a pod since then, or has none while `some_wait` for none.

    One that never gets Ready was not to be had, nor was one that took nothing though pods wait. One that was not heard
    for a while, with its pods, was there. `on`: the pods of a node.
    """
    ready = [(at, node.metadata.name) for node in nodes if (at := node.ready_since) is not None]
    for since, name in sorted(ready, reverse=True):
        bound = [pod.bound_at for pod in on(name) if not pod.ended]
        if any(at is not None and at >= since for at in bound) or not (bound or some_wait):
            return since
    return None


def without_node(state: ClusterState, pool: str) -> list[Pod]:
    """The pods of jobs that need a node, and are for the pool."""
    return [each for each in state.pods.indexed("waiting", pool) if state.job_of(each) is not None]


def waiting(
    state: ClusterState, pods: Sequence[Pod], rooms: Rooms, now: datetime
) -> list[tuple[Pod, datetime, Wait | None]]:
    """These pods, since when they wait, and for what."""
    jobs, found = dict[str, _Job](), list[tuple[Pod, datetime, Wait | None]]()
    for pod in pods:
        if (job := state.job_of(pod)) is None or (place := pod.place) is None:
            continue
        if job.metadata.uid not in jobs:
            made = {slot.place: slot.created_at for slot in job.status.slots if slot.created_at is not None}
            its = state.pods.indexed("run", (key_of(job), job.metadata.uid))
            jobs[job.metadata.uid] = _Job(near_since(job, its), made)
        known = jobs[job.metadata.uid]
        near = ALWAYS if place.role == "ps" else known.near_since
        since = max(pod.created or now, known.made.get(place, ALWAYS), near or ALWAYS)
        found.append((pod, since, wait_of(pod, rooms, near=near is not None)))
    return found
