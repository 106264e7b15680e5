"""All decisions about an active job, from the facts: what is wanted, what happened, what is done."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from shoal import manifests
from shoal.api.planning_status import PlanStatus
from shoal.manifests import names
from shoal.policy.actions import (
    Action,
    ApplyPodGroup,
    ConfirmAbsent,
    CreateDisruptionBudget,
    CreatePod,
    CreateSecret,
    CreateService,
    CreateWorkload,
    UpdateService,
)
from shoal.policy.decide import cleanup, completion, queueing, records, suspension
from shoal.policy.decide.admission import refusal_of, refused_recently
from shoal.policy.decide.completion import End
from shoal.policy.decide.counters import Counters
from shoal.policy.decide.creation import Actions
from shoal.policy.decide.exclusion import Exclusions, exclude
from shoal.policy.decide.kept_to import kept_to
from shoal.policy.decide.members import ByIndex, every
from shoal.policy.decide.room import gives_way, shut_out
from shoal.policy.decide.servers import create_servers
from shoal.policy.decide.usage import Usage, count, due
from shoal.policy.decide.wanted import Wanted, wanted
from shoal.policy.decide.workers import create_workers
from shoal.policy.facts.read import Facts
from shoal.policy.facts.verdict import PodOutcome
from shoal.policy.model import Observation

_FIRST_ACTIONS: tuple[type[Action], ...] = (
    ConfirmAbsent,
    CreateWorkload,
    CreateSecret,
    ApplyPodGroup,
    CreateService,
    UpdateService,
    CreatePod,
)
_ORDER = {kind: number for number, kind in enumerate(_FIRST_ACTIONS)}


@dataclass
class Decisions:
    """What was decided."""

    wanted: Wanted
    servers: ByIndex
    workers: ByIndex
    """Those that are not at rest."""
    counters: Counters
    actions: Actions
    usage: Usage
    exclusions: Exclusions
    end: End | None = None
    """How the job finished, if it did."""

    def looked_at(self, facts: Facts) -> frozenset[int] | None:
        """See `Plan`."""
        if facts.suspended:
            return None
        if not (facts.seen.first_look or facts.seen.unseen):  # as in most plans
            return self.wanted.workers
        undecided = self.actions.postponed | set(filter(self.wanted.is_homeless, self.wanted.workers))
        return self.wanted.workers - undecided

    def plan(self, facts: Facts) -> PlanStatus | None:
        """The plan, with what of it the job does not have the nodes of; before there is one, that alone."""
        found = self.wanted.planned.status or facts.job.status.plan or PlanStatus()
        kept = kept_to(facts, self.wanted, self.actions.denied)
        vain = dict(Counter(pool for pool, _ in facts.in_vain)) or None
        if (found.kept_to, found.in_vain) != (kept, vain):
            found = found.model_copy(update={"kept_to": kept, "in_vain": vain})
        return found if found.is_made or kept or vain else None

    def in_order(self) -> tuple[Action, ...]:
        """The actions, in the order in which they are carried out."""
        return tuple(sorted(self.actions.actions, key=lambda action: _ORDER.get(type(action), len(_ORDER))))


def decide(facts: Facts) -> Decisions:
    """The decisions about an active job."""
    counters, actions = Counters(facts.job.status, facts.now), Actions(facts.timers)
    goal = wanted(facts)
    goal.gives_way = gives_way(facts)
    disturbed = goal.disturbed(facts.at_rest, facts.timers)
    facts.rouse(disturbed | due(facts) | ({goal.gives_way.index} if goal.gives_way else set()))
    workers = records.update(facts, "worker", goal, counters)
    goal.servers = suspension.wants_server(facts, workers, facts.timers)
    servers = records.update(facts, "ps", goal, counters)
    end = completion.decide(facts, servers, workers, counters)
    usage, exclusions = (
        count(facts, servers, workers, ends=end is not None),
        exclude(facts, counters.failed_on),
    )
    decided = Decisions(goal, servers, workers, counters, actions, usage, exclusions, end)
    if end is not None:
        return decided
    actions.actions += _questions(facts)
    actions.actions += queueing.keep_workload(facts, servers, workers)
    if not facts.suspended:
        _foundations(facts, actions)
        create_servers(facts, servers, goal, actions)
        homeless = goal.servers_are_homeless and not any(each.pod for each in every(servers))
        servers_wait = homeless or bool(shut_out(facts))
        # Workers would hold their nodes for nothing, or this may be the job's end.
        if servers_wait or completion.awaits_nodes(facts, workers, counters):
            actions.postponed |= goal.workers
            if servers_wait:
                actions.denied |= {(home.pool, index) for index, home in goal.homes.items()}
        else:
            create_workers(facts, workers, goal, actions)
    else:
        actions.actions += cleanup.give_back(facts)
    most_kept = 1 if actions.quota else cleanup.MOST_KEPT
    actions.actions += cleanup.clean(facts, goal, (servers, workers), facts.timers, most_kept=most_kept)
    if any(each.awaiting_job_end for each in every(servers, workers)):
        facts.timers.after(records.DONE_PATIENCE.total_seconds())
    return decided


def _questions(facts: Facts) -> list[Action]:
    """What the API server is asked, since absence from a cache is weak evidence."""
    job = facts.job.metadata.name
    pods = {
        names.pod_name(job, each.place)
        for role in facts.sightings.values()
        for each in role
        if each.pod is None and each.verdict.outcome is PodOutcome.MISSING
    }
    return [*(ConfirmAbsent(name) for name in sorted(pods)), *cleanup.ask_for_nodes(facts)]


def _may_lack(seen: Observation, secret: str) -> bool:
    """Whether the Secret may be missing. A pod that runs has mounted it; one that does not start may wait for it."""
    if secret in seen.existing:
        return False
    started = any(pod.running for pod in seen.pods)
    return not started or any(pod.starts_on_node for pod in seen.pods)


def _needs_group(seen: Observation, group: str) -> bool:
    """Whether the PodGroup is to be applied. Pods that run need none; a refusal is asked and told again."""
    if seen.job.spec.run_policy.scheduling_policy.gang != "PodGroup" or group in seen.existing:
        return False
    all_run = bool(seen.pods) and all(pod.running for pod in seen.pods)
    return refusal_of(seen, group) is not None or not all_run


def _foundations(facts: Facts, actions: Actions) -> None:
    """Create the Secret, the disruption budget and the PodGroup. Services are created with their shards."""
    seen, job = facts.seen, facts.job
    secret, budget = names.secret_name(job), names.budget_name(job)
    if _may_lack(seen, secret) and not refused_recently(seen, secret, actions.timers):
        actions.actions.append(CreateSecret(secret))
    if budget not in seen.existing and not refused_recently(seen, budget, actions.timers):
        actions.actions.append(CreateDisruptionBudget(budget, manifests.disruption_budget(job)))
    group = names.group_key(job)
    if _needs_group(seen, group) and not refused_recently(seen, group, actions.timers):
        actions.actions.append(ApplyPodGroup(names.group_name(job), manifests.pod_group(job)))
