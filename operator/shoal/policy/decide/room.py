"""Room for a server that a ResourceQuota refuses: without it none of the job's workers trains.

The place that a dead server left may be another job's by now, whose server waits for workers as the workers of this one
wait for a server, all of them paid, for ever. So no worker is made before the server is there, who is to go goes at
once, and if that is not enough, one worker after the other gives way.
"""

from __future__ import annotations

from shoal.api.labels import Place
from shoal.manifests.names import place_of_name
from shoal.policy.decide.members import is_overdue
from shoal.policy.decide.wanted import loss
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Sighting
from shoal.policy.facts.verdict import ENDED, PodOutcome
from shoal.policy.model import Refusal, RefusalKind

_NOT_HEARD = frozenset({PodOutcome.UNREACHABLE, PodOutcome.LOST})


def shut_out(facts: Facts) -> list[Refusal]:
    """What a quota last said of servers that the job lacks."""
    if facts.suspended or not facts.seen.refusals:
        return []
    served = {each.place.index for each in facts.sightings["ps"] if each.pod is not None and _serves(each)}
    lacks = set(range(facts.job.spec.parameter_servers.replicas)) - served
    return [
        refusal
        for refusal in facts.seen.refusals
        if refusal.kind is RefusalKind.QUOTA
        and (place := place_of_name(refusal.name)) is not None
        and (place.role == "ps" and place.index in lacks)
    ]


def gives_way(facts: Facts) -> Place | None:
    """The worker that would be missed least, if a server was refused since a pod of the job last left.

    Twice: the quota may be counted some moments later. It is the next one's turn when this one is gone, and the server
    is refused again.
    """
    refused = shut_out(facts)
    if not any(each.times > 0 and place_of_name(each.name) not in facts.seen.in_flight for each in refused):
        return None
    there = [
        each
        for each in (*facts.sightings["ps"], *facts.sightings["worker"], *facts.at_rest)
        if each.pod is not None and not each.pod.ended
    ]
    if any(not _stays(each) and _is_awaited(each, facts) for each in there):
        return None
    workers = (each for each in there if each.place.role == "worker" and _stays(each))
    least = max(workers, key=lambda each: (loss(each), each.place), default=None)
    return least.place if least is not None else None


def _serves(server: Sighting) -> bool:
    """Whether no other one is made beside it."""
    return server.verdict.outcome not in (ENDED - {PodOutcome.DONE}) | _NOT_HEARD


def _stays(each: Sighting) -> bool:
    """Whether nothing ends it."""
    return each.verdict.outcome is PodOutcome.HEALTHY and not each.slot.cause


def _is_awaited(each: Sighting, facts: Facts) -> bool:
    """Whether the place of a pod that ends is free soon: no finalizer holds it."""
    assert each.pod is not None
    return each.verdict.outcome in _NOT_HEARD or not is_overdue(each.pod, facts.timers)
