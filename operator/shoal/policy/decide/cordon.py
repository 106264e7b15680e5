"""A server whose node is cordoned works on while no other one can be made.

It is moved since its disruption budget refuses to evict it, and a drain would not end. But a cordon has no deadline, so
nothing is lost while the drain waits, and everything stands still where a pod is refused then, by a policy or a webhook
that is down. Anything else that is said of its node has a deadline. So has the cordon of a spot node: some clouds
announce by nothing else that they take it.
"""

from __future__ import annotations

from shoal.manifests.platforms import is_spot
from shoal.policy.actions import CreatePod
from shoal.policy.decide.admission import gate
from shoal.policy.decide.creation import pod_of
from shoal.policy.decide.members import Member
from shoal.policy.decide.wanted import Wanted
from shoal.policy.facts.read import Facts
from shoal.policy.facts.signals import NODE_CORDONED, Meaning, node_signal


def is_only_cordoned(facts: Facts, server: Member) -> bool:
    """Whether a server works that is wanted, and is to leave its node, at any time."""
    node, reasons = facts.seen.nodes.get(server.slot.node), {server.slot.cause, server.verdict.reason}
    if reasons != {NODE_CORDONED.reason} or server.pod is None or not server.pod.ready or node is None:
        return False
    others = server.slot.model_copy(update={"role": "worker"})  # to which a cordon says nothing
    signal = node_signal(node, others, server.pod.spec.tolerations)
    said = signal is not None and signal.meaning >= Meaning.LEAVING
    return not said and not is_spot(node, facts.seen.platform)


def next_server(facts: Facts, wanted: Wanted, server: Member) -> CreatePod | None:
    """The pod that would follow, which the API server is asked about; None: it is known that none is made."""
    place = server.place._replace(incarnation=server.place.incarnation + 1)
    closed = gate(facts.seen, place.role, wanted.pool_of(place)).stalled is not None
    return (
        None if closed or facts.seen.unread or wanted.servers_are_homeless else pod_of(facts, wanted, place)
    )
