"""Times in objects, as this process may compare them with its own clock.

The API server, kubelets and earlier leaders write times by clocks of their own. What one of them says is still to come
would be waited for until then: for an hour, if that clock is an hour ahead. So what has happened and is said to lie
ahead happened when this process first heard of it, and each wait that begins with it is as long as it is meant to be.

So did what is said to be long past of a node that was known to be heard, and is not: after the patience with it, which
such a clock, or a watch that was behind, would leave out, servers are replaced (`policy.facts.blip`). And a taint that
says no time came when it was first seen: a failure long after it has another reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

from pydantic import BaseModel

from shoal.api.kube import Node, Pod
from shoal.api.training_job import TrainingJob
from shoal.policy.common.times import TOLERATED
from shoal.words import stamp

T = TypeVar("T", Pod, Node, TrainingJob)

MOMENTS = frozenset(
    {
        *(
            "creation_timestamp",
            "last_transition_time",
            "start_time",
            "started_at",
            "finished_at",
            "time_added",
        ),
        *("completion_time", "created_at", "ended_at"),
    }
)
"""Fields that say when something happened. A `deletion_timestamp` is later than that, by the grace period."""


def as_heard(old: T | None, new: T, now: datetime) -> T:
    """The object as it arrives now. `old`: as which it was known before."""
    if isinstance(new, Node) and isinstance(old, Node):
        new = _taints_as_heard(old, _silence_as_heard(old, new, now), now)
    happened, deleted = _Clock(now), None
    if new.metadata.deletion_timestamp is not None:
        grace = getattr(new.metadata, "deletion_grace_period_seconds", None) or 0
        deleted = _Clock(now, timedelta(seconds=grace))
    if not any(map(happened.is_ahead, _moments(new))) and not (
        deleted and deleted.is_ahead(new.metadata.deletion_timestamp)
    ):
        return new
    clocks = {**dict.fromkeys(MOMENTS, happened), "deletion_timestamp": deleted or happened}
    if isinstance(new, TrainingJob):
        # Nothing waits for what its metadata say, and every process numbers the pods of a named run by them.
        known = old.status if isinstance(old, TrainingJob) else None
        return new.model_copy(update={"status": _heard(known, new.status, clocks)})
    heard: T = _heard(old, new, clocks)
    return heard


def _silence_as_heard(old: Node, new: Node, now: datetime) -> Node:
    """The node, which turned Unknown when that was first heard, and not long before."""
    was, ready = old.condition("Ready"), new.condition("Ready")
    if ready is None or ready.status != "Unknown":
        return new
    said = ready.last_transition_time or ""
    if was is not None and was.status == "Unknown":
        since = max(said, was.last_transition_time or "")
    else:
        since = said if said >= stamp(now - TOLERATED) else stamp(now)
    if since == said:
        return new
    known = tuple(
        dataclasses.replace(each, last_transition_time=since) if each is ready else each
        for each in new.status.conditions
    )
    return new.model_copy(update={"status": dataclasses.replace(new.status, conditions=known)})


def _taints_as_heard(old: Node, new: Node, now: datetime) -> Node:
    """The node, whose new taints without a time were added now. Kubernetes writes one for those that evict only."""
    known = {(each.key, each.effect): each.time_added for each in old.spec.taints}
    taints = tuple(
        each
        if each.time_added is not None
        else dataclasses.replace(each, time_added=known.get((each.key, each.effect), stamp(now)))
        for each in new.spec.taints
    )
    if taints == new.spec.taints:
        return new
    return new.model_copy(update={"spec": dataclasses.replace(new.spec, taints=taints)})


class _Clock:
    """What is ahead. `by`: of times that may be so much later."""

    def __init__(self, now: datetime, by: timedelta = timedelta()) -> None:
        self._then = (now + by).replace(microsecond=0)
        self._latest = now + by + TOLERATED
        self._latest_text = stamp(self._latest)

    def is_ahead(self, said: str | datetime | None) -> bool:
        """Whether it cannot be."""
        if said is None:
            return False
        return said > self._latest_text if isinstance(said, str) else said > self._latest

    def heard(self, before: Any, said: Any) -> Any:
        """The time, of which `before` was known earlier."""
        if not self.is_ahead(said):
            return said
        if before and not self.is_ahead(before):  # else this clock was set back since
            return before
        return stamp(self._then) if isinstance(said, str) else self._then


def _heard(old: Any, new: Any, clocks: Mapping[str, _Clock]) -> Any:
    if isinstance(new, tuple):
        known = {_key(each): each for each in old} if isinstance(old, tuple) else {}
        return tuple(_heard(known.get(_key(each)), each, clocks) for each in new)
    if isinstance(new, BaseModel):
        names = tuple(type(new).model_fields)
    elif dataclasses.is_dataclass(new):
        names = tuple(each.name for each in dataclasses.fields(new))
    else:
        return new
    change = {}
    for name in names:
        before, said = getattr(old, name, None), getattr(new, name)
        clock = clocks.get(name)
        fresh = clock.heard(before, said) if clock is not None else _heard(before, said, clocks)
        if fresh is not said and fresh != said:
            change[name] = fresh
    if not change:
        return new
    return new.model_copy(update=change) if isinstance(new, BaseModel) else dataclasses.replace(new, **change)


def _key(part: Any) -> tuple[Any, ...]:
    """What a part of a list is, beside its time."""
    if hasattr(part, "place"):
        return tuple(part.place)
    return tuple(getattr(part, name, None) for name in ("type", "status", "name", "key", "effect"))


def _moments(seen: Pod | Node | TrainingJob) -> Iterator[str | datetime | None]:
    if not isinstance(seen, TrainingJob):
        yield seen.metadata.creation_timestamp
    match seen:
        case Pod():
            yield seen.status.start_time
            for container in (*seen.status.container_statuses, *seen.status.init_container_statuses):
                for state in (container.state, container.last_state):
                    if state.running is not None:
                        yield state.running.started_at
                    if state.terminated is not None:
                        yield from (state.terminated.started_at, state.terminated.finished_at)
        case Node():
            for taint in seen.spec.taints:
                yield taint.time_added
        case TrainingJob():
            yield seen.status.start_time
            yield seen.status.completion_time
            for slot in seen.status.slots:
                yield slot.created_at
                yield slot.ended_at
    for condition in seen.status.conditions:
        yield condition.last_transition_time
