"""Parameter servers: at most one live pod for each shard.

A shard's next pod is created after the previous one has ended, since that takes a final snapshot; a pod on a lost node
or past its grace period is not waited for. The incarnation is the shard's epoch: clients and storage reject a lower
one. So an epoch is never used twice: it is recorded in the status before its pod is created, except that of the first
pods, which have nothing to lose. Each shard has one Service, which selects only the current incarnation.
"""

from __future__ import annotations

from datetime import timedelta

from shoal import manifests
from shoal.api.labels import INCARNATION, ROLE, Place, place_in
from shoal.manifests import names
from shoal.policy.actions import ConfirmAbsent, CreateService, DeleteService, UpdateService
from shoal.policy.decide.admission import name_conflict_gate, refused_recently
from shoal.policy.decide.creation import Actions, Creator
from shoal.policy.decide.members import ByIndex, Member, follows_a_loss
from shoal.policy.decide.wanted import Wanted
from shoal.policy.facts.read import Facts
from shoal.policy.facts.verdict import PodOutcome
from shoal.policy.model import Reason

PLANNED_FOR = timedelta(seconds=10)
"""A planned pod that is not there after this time may have been created and lost by another leader."""
CONFLICT_RETRY = timedelta(seconds=60)
FIRST_LOOK_SECONDS = 1.0
"""Until a new leader looks again whether it has stored a status, and may turn a Service."""


def create_servers(facts: Facts, servers: ByIndex, wanted: Wanted, actions: Actions) -> None:
    """Create the missing pods and Services of the shards; records of planned pods are added to `servers`."""
    replicas = facts.job.spec.parameter_servers.replicas
    creator = Creator(facts, "ps", wanted, actions)
    creator.gate(wanted.pool_of(Place("ps", 0, 0)))  # what is wrong is told before a pod is missing
    for shard in range(replicas):
        members = servers.setdefault(shard, [])
        if not any(_occupies(each, actions) for each in members):
            _create(facts, shard, members, creator, homeless=wanted.servers_are_homeless)
        _service(facts, shard, _current(members) if members else facts.first_incarnation, actions)
        if not members:
            del servers[shard]
    _remove_services_beyond(facts, replicas, actions)


def _create(facts: Facts, shard: int, members: list[Member], creator: Creator, *, homeless: bool) -> None:
    last = members[-1] if members else None
    may_have_been = last is None and facts.seen.first_look
    if homeless and not may_have_been:
        return
    if may_have_been and _ask(facts, shard, creator.actions):
        return
    if (place := creator.next_place(shard, members)) is None:
        return
    if last is not None and last.planned and _is_old(facts, last) and place == last.place:
        place = place._replace(incarnation=place.incarnation + 1)
    first = place.incarnation == facts.first_incarnation
    if first or (last is not None and place == last.place):
        creator.create(place, replaces=follows_a_loss(members))
        return
    creator.plan_ahead(place, members, facts.now)


def _ask(facts: Facts, shard: int, actions: Actions) -> bool:
    """Whether a shard's first server is being made or asked for: it may be there, made by another leader or unheard.

    If it is gone, the next epoch is recorded while that is known.
    """
    place = Place("ps", shard, facts.first_incarnation)
    name = names.pod_name(facts.job.metadata.name, place)
    if place in facts.seen.in_flight:
        return True
    if name in facts.seen.gone_pods:
        return False
    actions.actions.append(ConfirmAbsent(name))
    return True


def _is_old(facts: Facts, planned: Member) -> bool:
    """Whether its pod may have existed, and gone. One that was refused, or is being made, did not."""
    name = names.pod_name(facts.job.metadata.name, planned.place)
    if planned.place in facts.seen.in_flight or any(r.name == name for r in facts.seen.refusals):
        return False
    at = planned.slot.created_at
    return at is not None and facts.now - at > PLANNED_FOR


def _occupies(server: Member, actions: Actions) -> bool:
    """Whether the shard has this pod, or must wait for its final snapshot, or until its loss is confirmed."""
    return server.active or server.awaiting_job_end or server.missing or server.may_run(actions.timers)


def _current(members: list[Member]) -> int:
    """The incarnation that clients are sent to: the newest, but not before it runs if the earlier one may be alive."""
    newest = members[-1]
    if newest.pod is None or not newest.pod.running:
        alive = [
            each
            for each in members
            if (each.active and each is not newest) or each.verdict.outcome is PodOutcome.UNREACHABLE
        ]
        return (alive or members)[-1].place.incarnation
    return newest.place.incarnation


def _service(facts: Facts, shard: int, incarnation: int, actions: Actions) -> None:
    seen, job = facts.seen, facts.job
    name = names.service_name(job.metadata.name, shard)
    selector = names.service_selector(job, shard, incarnation)
    service = seen.services.get(name)
    if service is not None:
        found = service.spec.selector
        if found == selector:
            return
        if seen.first_look:  # it may know more than the status that was read
            actions.timers.after(FIRST_LOOK_SECONDS)
            return
        if _is_foreign(found, selector):
            words = f"another manager changes the selector of Service {name}: exempt the Service from it"
            actions.conflict = actions.conflict or Reason("FieldConflict", words)
            before = job.status.condition("Degraded")
            told = before is not None and (before.status, before.reason) == ("True", "FieldConflict")
            if before and told and actions.timers.pending(before.last_transition_time + CONFLICT_RETRY):
                return
        back_from, back_to, later, here = "", "", place_in(found), Place("ps", shard, incarnation)
        if (
            later is not None and later > here
        ):  # its pod is gone; or another leader made it, and it is not seen yet
            back_from, back_to = (names.pod_name(job.metadata.name, each) for each in (later, here))
            if all(pod.metadata.name != back_to for pod in seen.pods):
                return
        actions.actions.append(UpdateService(name, selector, back_from, back_to))
        return
    if (conflict := name_conflict_gate(seen, name)) is not None:
        actions.closed(conflict)
        if not conflict.open:
            return
    if not refused_recently(seen, name, actions.timers):
        actions.actions.append(CreateService(name, manifests.service(job, shard, incarnation)))


def _is_foreign(found: dict[str, str], ours: dict[str, str]) -> bool:
    """Whether the selector is not one that Shoal ever set."""
    return found.keys() != ours.keys() or any(
        found[key] != value for key, value in ours.items() if key != INCARNATION
    )


def _remove_services_beyond(facts: Facts, replicas: int, actions: Actions) -> None:
    wanted = {names.service_name(facts.job.metadata.name, shard) for shard in range(replicas)}
    actions.actions += [
        DeleteService(name, service.metadata.uid)
        for name, service in facts.seen.services.items()
        if name not in wanted and service.metadata.labels.get(ROLE) == "ps"
    ]
