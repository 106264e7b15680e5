"""Parameter servers: one pod for each shard, never two that both believe to be it.

A shard's next pod follows the end of the last one, since that takes a final snapshot on its way out; only where its
machine is lost, or it outstays its grace period, is it not waited for. The incarnation is the shard's epoch: clients
and the storage refuse a lower one. Each shard has one Service, which selects the current incarnation only.
"""

from __future__ import annotations

from datetime import timedelta

from shoal.policy import manifests, names
from shoal.policy.admission import taken, too_early
from shoal.policy.creation import Creator, Decisions
from shoal.policy.incarnations import ByIndex, Incarnation
from shoal.policy.model import CreateService, DeleteService, Observation, UpdateService
from shoal.policy.times import parse_time

OVERSTAY = timedelta(seconds=5)


def fill(seen: Observation, servers: ByIndex, decisions: Decisions) -> None:
    """Create the shards' pods and Services that are wanted and not there."""
    replicas = seen.job.spec.parameter_servers.replicas
    creator = Creator(seen, "ps", decisions)
    for shard in range(replicas):
        of = servers.get(shard, ())
        current = of[-1].place.incarnation if of else 0
        if (
            not any(_holds(h, seen, decisions) for h in of)
            and (place := creator.create(shard, of)) is not None
        ):
            current = place.incarnation
        _service(seen, shard, current, decisions)
    _remove_services_beyond(seen, replicas, decisions)


def _holds(holder: Incarnation, seen: Observation, decisions: Decisions) -> bool:
    """The shard's pod is there, or still busy with its last snapshot."""
    if holder.staying or holder.awaiting_the_end:
        return True
    if not holder.alive or holder.pod is None:
        return False
    deadline = parse_time(holder.pod.metadata.deletion_timestamp)  # the end of its grace period
    if deadline is None:
        return True
    left = (deadline + OVERSTAY - seen.now).total_seconds()
    if left > 0:
        decisions.wake_after.append(left)
    return left > 0


def _service(seen: Observation, shard: int, incarnation: int, decisions: Decisions) -> None:
    name = names.service_name(seen.job.metadata.name, shard)
    selector = names.service_selector(seen.job, shard, incarnation)
    service = seen.services.get(name)
    if service is None:
        if (blocked := taken(seen, name)) is None:
            if not too_early(seen, name, decisions.wake_after):
                # Before the pod: workers may already be asking for the name.
                decisions.actions.append(CreateService(name, manifests.service(seen.job, shard, incarnation)))
            return
        decisions.stalled = decisions.stalled or blocked.stalled
        if blocked.wait_seconds is not None:
            decisions.wake_after.append(blocked.wait_seconds)
    elif service.spec.selector != selector:
        decisions.actions.append(UpdateService(name, selector))


def _remove_services_beyond(seen: Observation, replicas: int, decisions: Decisions) -> None:
    wanted = {names.service_name(seen.job.metadata.name, shard) for shard in range(replicas)}
    decisions.actions += [
        DeleteService(name, service.metadata.uid)
        for name, service in seen.services.items()
        if name not in wanted and service.metadata.labels.get(names.ROLE) == "ps"
    ]
