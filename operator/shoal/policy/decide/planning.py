"""Adopts the planner's proposals: how many workers of which pool are wanted (`status.plan`).

Mode Auto carries out what all proposals of the last `stabilizationSeconds` agree to: soon if there are to be more
workers, late if fewer. Mode Advise only tells it. The other modes keep to `workers.replicas`, and tell what that is
expected to give.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from shoal.api.planning_status import PlanStatus
from shoal.api.training_job_status import UNWANTED
from shoal.manifests.names import place_of_name
from shoal.policy.decide.homes import Homes, needs_a_node
from shoal.policy.decide.kept_to import pods_by_pool
from shoal.policy.decide.lasting import lasting
from shoal.policy.decide.members import newest_of
from shoal.policy.facts.read import Facts
from shoal.policy.facts.sightings import Home
from shoal.policy.model import Event, Proposal, Reason, RefusalKind, Wish

STALE_SECONDS = 600.0
"""A proposal older than this is not adopted: its planner has stopped."""

IGNORANT_SECONDS, IGNORANT_SHARE = 600.0, 0.25
"""How long a job may wait for its first measurement: seconds, and the share of its deadline."""


@dataclass(frozen=True)
class Planned:
    """The plan, and what follows from it."""

    workers: int
    """How many workers are wanted."""
    counts: Mapping[str, int] | None = None
    """Workers by pool, where a plan decides."""
    status: PlanStatus | None = None
    ready: Reason | None = None
    not_ready: Reason | None = None
    events: tuple[Event, ...] = ()


def planned(facts: Facts, homes: Homes, replicas: int) -> Planned:
    """The plan of a job. `replicas`: of its spec."""
    if not homes.named:
        return Planned(replicas)
    mode, proposal = facts.job.spec.elasticity.mode, _usable(facts, homes)
    before = facts.job.status.plan
    before = before if before is not None and before.is_made else None
    if not homes.pools:
        return Planned(sum(before.pools.values()) if before and mode == "Auto" else replicas, status=before)
    if mode == "Auto":
        return _auto(facts, homes, replicas, before, proposal)
    if mode == "Advise":
        if proposal is None:
            return Planned(replicas, None, before, *_readiness(None))
        status = _status(facts, before, proposal.pools, proposal, proposal.reason)
        return Planned(
            replicas, None, status, *_readiness(proposal), events=_changes(before, status, "advised: ")
        )
    counts = _current(facts, homes)
    fits = proposal is not None and dict(proposal.pools) == counts
    status = _status(facts, before, counts, proposal if fits else None, "workers.replicas")
    return Planned(replicas, None, status)


def _usable(facts: Facts, homes: Homes) -> Proposal | None:
    """The proposal, if it is fresh, and was made for the pools that the job has now."""
    proposal = facts.seen.proposal
    if proposal is None or proposal.age_seconds > STALE_SECONDS:
        return None
    return proposal if proposal.pools.keys() <= homes.pools.keys() | _unseen(facts) else None


def _unseen(facts: Facts) -> set[str]:
    """Pools of the job that are not read, perhaps not yet: their workers stay."""
    return set(facts.job.spec.workers.pools) - facts.seen.pools.keys()


def _auto(
    facts: Facts, homes: Homes, replicas: int, before: PlanStatus | None, proposal: Proposal | None
) -> Planned:
    left = list[str]()
    if before is None or not before.pools:
        known = _filled(homes, {}, replicas)
        reason = "the job begins with workers.replicas, until the planner knows more"
    else:
        counts, here = before.pools, homes.pools.keys() | _unseen(facts)
        known, reason = {name: count for name, count in counts.items() if name in here}, before.reason
        if left := sorted(counts.keys() - here):
            known = _filled(homes, known, sum(counts.values()))
            reason = f"workers leave {', '.join(left)}, which workers.pools or workers.zonePolicy exclude now"
    most = facts.job.spec.workers.max_replicas
    if most is not None and sum(known.values()) > most:
        known, reason = _at_most(known, most, homes), f"workers.maxReplicas is {most} now"
    readiness = _readiness(proposal)
    if proposal is not None:
        proposed = _clamped(homes, proposal, known)
        moves_anyway = bool(left) and sum(proposed.values()) >= sum(known.values())
        if sum(proposed.values()) < homes.job.spec.workers.min_replicas:
            words = f"{proposal.reason} (fewer than workers.minReplicas: the workers stay as they are{_taken(homes)})"
            readiness = None, Reason("NotFeasible", words)
        elif before is None or moves_anyway or _is_due(facts, homes, known, proposed, proposal):
            known, reason = proposed, proposal.reason
        elif (changed := _lasting(facts, known, proposed, proposal)) != known:
            known, reason = changed, proposal.reason
            if changed != proposed:
                seconds = _wait(facts, known, proposed, proposal)
                reason = f"{reason} (of that, what all plans of the last {seconds} s agree to)"
    if (within := _within_quota(facts, homes, known)) != known:
        known = within
        reason = f"{reason} (a ResourceQuota refuses more pods: of what it refuses, one worker is asked for)"
    fits = proposal if proposal is not None and _clamped(homes, proposal, known) == known else None
    if fits is not None and _learns(before, fits):
        reason = fits.reason
    status = _status(facts, before, known, fits, reason)
    changes = _changes(before, status, "")
    return Planned(sum(known.values()), known, status, *readiness, events=changes)


def _taken(homes: Homes) -> str:
    """How many nodes others have. Not who: what runs in other namespaces is told to those who may see the pools."""
    taken = {name: homes.taken[name] for name in homes.pools if homes.taken.get(name)}
    if not taken:
        return ""
    found = ", ".join(
        f"{number} of {homes.pools[name].spec.limits.nodes} {name}" for name, number in taken.items()
    )
    return f"; other jobs have, or are to have, {found}, as the status of the pools says"


def _filled(homes: Homes, counts: Mapping[str, int], number: int) -> dict[str, int]:
    """`number` workers by pool: those that have one already (`counts`), the others by order of preference."""
    used = Counter({Home(name): count for name, count in counts.items()})
    while used.total() < number and (home := homes.next(used)) is not None:
        used[home] += 1
    return {home.pool: count for home, count in used.items() if count}


def _at_most(counts: Mapping[str, int], most: int, homes: Homes) -> dict[str, int]:
    """So many workers, of which those in the least preferred pools go."""
    kept = dict[str, int]()
    for name in homes.job.spec.workers.pools:
        kept[name] = min(counts.get(name, 0), most - sum(kept.values()))
    return {name: count for name, count in kept.items() if count}


def _within_quota(facts: Facts, homes: Homes, counts: Mapping[str, int]) -> dict[str, int]:
    """The workers that a ResourceQuota of the namespace admits, and one more while it refuses any.

    That one is tried again and again, which shows when there is room. Not fewer than the job is to begin with: it would
    begin with one, and two such jobs might keep the nodes from each other that each needs. Whatever is planned, the job
    has the nodes of its pods only (`kept_to`).
    """
    refused = (each.name for each in facts.seen.refusals if each.kind is RefusalKind.QUOTA)
    if not any((place := place_of_name(name)) is not None and place.role == "worker" for name in refused):
        return dict(counts)
    have = pods_by_pool(facts)
    coming = sum(place.role == "worker" for place in facts.seen.in_flight)
    most = max(have.total() + coming + 1, _floor(homes, counts))
    kept = dict(counts)
    for name in reversed(homes.job.spec.workers.pools):
        above = min(sum(kept.values()) - most, kept.get(name, 0) - have[name])
        if above > 0:
            kept[name] -= above
    return {name: count for name, count in kept.items() if count}


def _floor(homes: Homes, now: Mapping[str, int]) -> int:
    """How many of its workers a job keeps, whoever wants their nodes: as the planner has it (`FleetJob.floor`).

    So it proposes no fewer, but where it can propose nothing.
    """
    return min(homes.job.spec.workers.min_replicas, sum(now.values()))


def _clamped(homes: Homes, proposal: Proposal, now: Mapping[str, int]) -> dict[str, int]:
    """The proposal within what the spec and the pools allow; what the job has already is not given up for others.

    While other jobs have nodes that workers are to move to, these stay where no other job is to have theirs; where one
    is, as many do as the job keeps: two jobs that wait for each other's nodes both give up what they can spare.
    """
    left = homes.job.spec.workers.max_replicas or 1_000
    proposed = proposal.pools
    counts = {name: min(n, now.get(name, 0)) for name, n in proposed.items() if name not in homes.pools}
    left -= sum(counts.values())  # workers whose pool is not read stay, and no more come
    for home in homes.all():
        room = max(homes.limit(home), min(now.get(home.pool, 0), homes.pools[home.pool].spec.limits.nodes))
        counts[home.pool] = max(0, min(proposed.get(home.pool, 0), room, left))
        left -= counts[home.pool]
    if any(count < proposed.get(name, 0) for name, count in counts.items()):
        left, floor = min(left, sum(now.values()) - sum(counts.values())), _floor(homes, now)
        for name in sorted(counts, key=lambda name: (name in proposal.traded, name)):
            most = min(left, floor - sum(counts.values())) if name in proposal.traded else left
            stay = max(0, min(now.get(name, 0) - counts[name], most))
            counts[name] += stay
            left -= stay
    return {name: count for name, count in counts.items() if count}


def _is_due(
    facts: Facts, homes: Homes, now: Mapping[str, int], proposed: Mapping[str, int], proposal: Proposal
) -> bool:
    """Whether the counts change at once, however long they have been proposed.

    To leave what is not to be had for another pool disturbs no worker, so it waits for nothing.
    """
    every = (*facts.sightings["worker"], *facts.at_rest.starting.values())
    in_vain = {each.slot.pool for each in every if needs_a_node(facts, each)} & homes.pools.keys()
    left = {name for name, count in now.items() if proposed.get(name, 0) < count}
    moves = any(count > now.get(name, 0) for name, count in proposed.items())
    if moves and any(homes.is_exhausted(Home(name)) for name in in_vain & left):
        return True
    return proposal.urgent and not _waits_for_measurement(facts, proposal)


def _lasting(
    facts: Facts, now: dict[str, int], proposed: Mapping[str, int], proposal: Proposal
) -> dict[str, int]:
    """The counts after what has been proposed for long enough."""
    if dict(now) == dict(proposed) or _waits_for_measurement(facts, proposal):
        return now
    wait = timedelta(seconds=_wait(facts, now, proposed, proposal))
    wishes = [(wish.since, wish.pools) for wish in (*proposal.before, Wish(proposal.since, proposed))]
    return lasting(now, wishes, lambda since: facts.timers.pending(since + wait))


def _wait(facts: Facts, now: Mapping[str, int], proposed: Mapping[str, int], proposal: Proposal) -> int:
    """For how many seconds a change must have been proposed."""
    wait = facts.job.spec.elasticity.stabilization_seconds
    grows = sum(proposed.values()) > sum(now.values())
    return wait.up if grows or proposal.traded else wait.down


def _waits_for_measurement(facts: Facts, proposal: Proposal) -> bool:
    """Whether a plan misses its limits for ignorance, which a minute of work ends: what begins so buys too much."""
    began, deadline = facts.job.status.start_time, facts.job.spec.elasticity.objective.deadline_seconds
    if proposal.feasible or proposal.measured or began is None:
        return False
    most = min(IGNORANT_SECONDS, IGNORANT_SHARE * deadline) if deadline else IGNORANT_SECONDS
    return facts.timers.pending(began + timedelta(seconds=most))


def _readiness(proposal: Proposal | None) -> tuple[Reason | None, Reason | None]:
    """Why the plan is ready, and why it is not."""
    if proposal is None:
        return None, Reason("Waiting", "the planner has not proposed anything for these pools yet")
    if proposal.feasible:
        return Reason("Planned", proposal.reason), None
    return None, Reason("NotFeasible", proposal.reason)


def _current(facts: Facts, homes: Homes) -> dict[str, int]:
    """Workers by pool, as they are recorded."""
    newest = newest_of(facts.sightings["worker"]).values()
    counts = Counter(each.home for each in newest if each.slot.cause != UNWANTED)
    counts.update(facts.at_rest.living)
    return {name: counts[Home(name)] for name in homes.pools if counts[Home(name)]}


def _status(
    facts: Facts,
    before: PlanStatus | None,
    counts: Mapping[str, int],
    proposal: Proposal | None,
    reason: str,
) -> PlanStatus:
    """The plan as it is told. Its expectations are those of the proposal with the same counts, if there is one.

    Its reason is that of its decision, also of the first that knew enough and kept the counts: those of later ones have
    figures that change each minute.
    """
    changed = before is None or dict(before.pools) != dict(counts)
    if proposal is not None:
        finish = _minute(proposal.finish_time, facts.now)
    else:
        finish = (
            before.finish_time if before and before.finish_time and before.finish_time > facts.now else None
        )
    return PlanStatus(
        revision=(before.revision if before else 0) + changed,
        summary=", ".join(f"{count} {name}" for name, count in counts.items()),
        pools=dict(counts),
        parameter_servers=proposal.parameter_servers if proposal else before and before.parameter_servers,
        finish_time=finish,
        cost=_decimal(proposal.cost, 2) if proposal else before and before.cost,
        confidence=_decimal(proposal.confidence, 2) if proposal else before and before.confidence,
        reason=reason if changed or before is None or _learns(before, proposal) else before.reason,
        decided_at=facts.now if changed or before is None else before.decided_at,
    )


def _learns(before: PlanStatus | None, proposal: Proposal | None) -> bool:
    """Whether the proposal knows when the job ends, and the plan did not."""
    known = before is not None and before.finish_time is not None
    return proposal is not None and proposal.finish_time is not None and not known


def _changes(before: PlanStatus | None, after: PlanStatus, prefix: str) -> tuple[Event, ...]:
    if before is not None and before.pools == after.pools:
        return ()
    was = before.summary if before is not None and before.summary else "nothing"
    words = f"{prefix}{was} -> {after.summary or 'nothing'}: {after.reason}"
    return (Event("Normal", "PlanChanged", words),)


def _minute(moment: datetime | None, now: datetime) -> datetime | None:
    """The end of its minute, or of this one where it has passed: a status that changes is a write."""
    if moment is None:
        return None
    later = max(moment, now)
    full = later.replace(second=0, microsecond=0)
    return full + timedelta(minutes=full < later)


def _decimal(value: float | None, digits: int) -> str | None:
    return None if value is None else f"{value:.{digits}f}"
