"""The plan for one job: an observation in, actions, status and events out.

Pure: no clock, no I/O, no memory. The same observation always gives the same plan, and the observation after a plan was
carried out gives an empty one.
"""

from __future__ import annotations

from dataclasses import replace

from shoal.api.training_job import MANAGED_BY
from shoal.policy import cleanup, completion, finish, manifests, names, slots, suspension
from shoal.policy.admission import refused_recently
from shoal.policy.changes import events_of_changes
from shoal.policy.counters import Counters
from shoal.policy.creation import Decisions
from shoal.policy.incarnations import every
from shoal.policy.model import (
    CreateDisruptionBudget,
    CreatePod,
    CreateSecret,
    CreateService,
    Images,
    Observation,
    Plan,
    UpdateService,
)
from shoal.policy.parameter_servers import create_servers
from shoal.policy.status import Assessment
from shoal.policy.timers import Timers
from shoal.policy.workers import create_workers

_FIRST_ACTIONS = (CreateSecret, CreateService, UpdateService, CreatePod)


def plan(seen: Observation) -> Plan:
    """What to do about a job, and its new status."""
    job = seen.job
    if (images := job.status.images) is not None:  # a newer operator must not mix versions within a job
        seen = replace(seen, images=Images(images.ps, images.worker))
    if job.metadata.deletion_timestamp or (job.spec.managed_by or MANAGED_BY) != MANAGED_BY:
        return Plan((), job.status)
    if job.status.finished:
        return finish.afterwards(seen)

    timers = Timers(seen.now)
    counters = Counters(job.status, seen.now)
    decisions = Decisions(timers)
    workers = slots.update(seen, "worker", suspension.wants_worker(job), counters)
    servers = slots.update(seen, "ps", suspension.wants_server(seen, workers, timers), counters)
    assessment = Assessment(seen, servers, workers, counters, decisions)

    if end := completion.decide(seen, servers, counters, timers):
        return finish.ending(seen, end, assessment.status(), counters.events)

    if not job.spec.suspend:
        _foundations(seen, decisions)
        create_servers(seen, servers, decisions)
        create_workers(seen, workers, decisions)
    else:
        decisions.actions += cleanup.budget(seen)
    decisions.actions += cleanup.clean(seen, (servers, workers), timers)
    if any(each.awaiting_job_end for each in every(servers, workers)):
        timers.after(slots.DONE_PATIENCE.total_seconds())

    status = assessment.status()
    return Plan(
        actions=tuple(sorted(decisions.actions, key=_order)),
        status=status,
        events=(*counters.events, *events_of_changes(seen, servers, workers, status)),
        wake_after=timers.next_seconds,
    )


def _order(action: object) -> int:
    return next((i for i, kind in enumerate(_FIRST_ACTIONS) if isinstance(action, kind)), len(_FIRST_ACTIONS))


def _foundations(seen: Observation, decisions: Decisions) -> None:
    """Create the Secret and the disruption budget. Services are created with their shards."""
    secret, budget = names.secret_name(seen.job), names.budget_name(seen.job)
    if secret not in seen.existing and not refused_recently(seen, secret, decisions.timers):
        decisions.actions.append(CreateSecret(secret))
    if budget not in seen.existing and not refused_recently(seen, budget, decisions.timers):
        decisions.actions.append(CreateDisruptionBudget(budget, manifests.disruption_budget(seen.job)))
