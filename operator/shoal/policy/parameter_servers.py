"""Parameter servers: at most one live pod for each shard.

A shard's next pod is created after the previous one has ended, since that takes a final snapshot; a pod on a lost node
or past its grace period is not waited for. The incarnation is the shard's epoch: clients and storage reject a lower
one. Each shard has one Service, which selects only the current incarnation.
"""

from __future__ import annotations

from shoal.policy import manifests, names
from shoal.policy.admission import name_conflict_gate, refused_recently
from shoal.policy.creation import Creator, Decisions
from shoal.policy.incarnations import ByIndex, Incarnation
from shoal.policy.model import CreateService, DeleteService, Observation, UpdateService


def create_servers(seen: Observation, servers: ByIndex, decisions: Decisions) -> None:
    """Create the missing pods and Services of the shards."""
    replicas = seen.job.spec.parameter_servers.replicas
    creator = Creator(seen, "ps", decisions)
    for shard in range(replicas):
        incarnations = servers.get(shard, ())
        current = incarnations[-1].place.incarnation if incarnations else 0
        occupied = any(_occupies(each, decisions) for each in incarnations)
        if not occupied and (place := creator.create(shard, incarnations)) is not None:
            current = place.incarnation
        _service(seen, shard, current, decisions)
    _remove_services_beyond(seen, replicas, decisions)


def _occupies(server: Incarnation, decisions: Decisions) -> bool:
    """Whether the shard has this pod, or must wait for its final snapshot."""
    return server.active or server.awaiting_job_end or server.may_run(decisions.timers)


def _service(seen: Observation, shard: int, incarnation: int, decisions: Decisions) -> None:
    name = names.service_name(seen.job.metadata.name, shard)
    selector = names.service_selector(seen.job, shard, incarnation)
    service = seen.services.get(name)
    if service is not None:
        if service.spec.selector != selector:
            decisions.actions.append(UpdateService(name, selector))
    elif (conflict := name_conflict_gate(seen, name)) is not None:
        decisions.report(conflict)
    elif not refused_recently(seen, name, decisions.timers):
        decisions.actions.append(CreateService(name, manifests.service(seen.job, shard, incarnation)))


def _remove_services_beyond(seen: Observation, replicas: int, decisions: Decisions) -> None:
    wanted = {names.service_name(seen.job.metadata.name, shard) for shard in range(replicas)}
    decisions.actions += [
        DeleteService(name, service.metadata.uid)
        for name, service in seen.services.items()
        if name not in wanted and service.metadata.labels.get(names.ROLE) == "ps"
    ]
