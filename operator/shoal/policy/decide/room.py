"""Room for a server that a ResourceQuota refuses: without it none of the job's workers trains.

The place that a dead server left may be another job's by now, whose server waits for workers as the workers of this one
wait for a server, all of them paid, for ever. So no worker is made before the server is there, who is to go goes at
once, and if that is not enough, one worker after the other gives way: none where that is in vain by what the quota says
of itself, and where it says nothing of it (it may count servers alone), one in a minute.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from datetime import timedelta

from shoal.api.amounts import quantity
from shoal.api.labels import Place
from shoal.manifests.names import place_of_name
from shoal.policy.common.times import parse_time
from shoal.policy.decide.admission import refused_since
from shoal.policy.decide.members import GAVE_WAY, OVERSTAY, is_overdue
from shoal.policy.decide.wanted import loss
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Sighting
from shoal.policy.facts.verdict import ENDED, PodOutcome
from shoal.policy.model import Refusal, RefusalKind

HELD_UP = timedelta(seconds=60)
"""A server that could start for so long, and has not, may wait for what the one before it holds; so does one that a
quota refused for so long. And as long after a worker gave way, perhaps in vain, none does."""

_NOT_HEARD = frozenset({PodOutcome.UNREACHABLE, PodOutcome.LOST})
_COUNTS_ENDED = "count/pods"
_OF_ONE = frozenset({"pods", _COUNTS_ENDED})
"""What each pod has one of."""
_SAYS = re.compile(r"requested: (?P<requested>.*), used: (?P<used>.*), limited: (?P<limited>.*)", re.DOTALL)
"""The words of a ResourceQuota about what is exceeded: `cpu=1,memory=2Gi` of each."""


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


def in_the_way(facts: Facts) -> frozenset[PodOutcome]:
    """Of which outcomes pods that are to end do so at once, for a server that a quota refuses.

    What is not heard may be alive, and heard again in a moment.
    """
    if not (refused := shut_out(facts)):
        return frozenset()
    left = max(map(refused_since, refused)) + HELD_UP.total_seconds() - facts.seen.at
    if left <= 0:
        return frozenset(PodOutcome)
    facts.timers.after(left)
    return frozenset(PodOutcome) - {PodOutcome.UNREACHABLE}


def counts_ended(facts: Facts) -> bool:
    """Whether pods that ended are in the way of a server, too."""
    return any(_COUNTS_ENDED in each.message for each in shut_out(facts))


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
    workers = [each for each in there if each.place.role == "worker" and _stays(each)]
    if not all(_may_make_room(workers, each.message) for each in refused):
        return None
    gone = (each.ended_at for each in facts.records if each.cause == GAVE_WAY)
    last = max((at for at in gone if at is not None), default=None)
    if last is not None and facts.timers.pending(last + HELD_UP):
        return None
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
    if each.verdict.outcome not in _NOT_HEARD:
        return not is_overdue(each.pod, facts.timers)
    meta = each.pod.metadata
    if (deadline := parse_time(meta.deletion_timestamp)) is None:
        return True
    patience = timedelta(seconds=facts.job.spec.run_policy.force_delete_after_seconds)
    deleted = deadline - timedelta(seconds=meta.deletion_grace_period_seconds or 0)
    return facts.timers.pending(deleted + patience + OVERSTAY)


def _may_make_room(workers: Iterable[Sighting], message: str) -> bool:
    """Whether there would be room without these, by the words of a quota, which need not count them.

    What they have of limits is not known.
    """
    if (found := _SAYS.search(message)) is None:
        return True
    requested, used, limited = (_amounts(found[each]) for each in ("requested", "used", "limited"))
    have = Counter[str]()
    for each in workers:
        assert each.pod is not None
        have.update(dict.fromkeys(_OF_ONE, 1.0) | dict(each.pod.spec.requests))
    lacks = {
        name: amount + used.get(name, 0.0) - limited.get(name, 0.0) for name, amount in requested.items()
    }
    return all(
        name.startswith("limits.") or round(amount - have[name.removeprefix("requests.")], 6) <= 0
        for name, amount in lacks.items()
    )


def _amounts(words: str) -> dict[str, float]:
    named = (each.partition("=") for each in words.split(","))
    return {name.strip(): quantity(text.strip()) for name, _, text in named}
