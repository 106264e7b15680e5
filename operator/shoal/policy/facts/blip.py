"""Whether nodes that are not heard are to be believed gone, or the control plane is to be suspected first.

When the API server, its load balancer or a network between them pauses, all kubelets are silent at once while their
pods run on. Kubernetes' own node controller evicts nothing while no node is heard (`FullDisruption`), and neither does
Shoal: there is no node for a replacement either. When they are heard again, they are not all at once.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from datetime import datetime, timedelta

from shoal.api.kube import Node
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import TOLERATED, parse_time
from shoal.policy.model import Observation, Reason

SHARE = 0.2
FEWEST = 3
"""More than this share of the nodes, and at least so many: fewer may go at once by chance."""
PATIENCE = timedelta(seconds=60)
"""How long such nodes are waited for."""
NEARLY_ALL = 0.9
"""Where more than this share of the nodes is not heard, they are waited for without an end, and those that are not
heard yet when others are again for `PATIENCE`."""
LONG_BEFORE = timedelta(minutes=10)
"""What takes a network or a control plane away takes the nodes within less."""
LOOK_AGAIN_SECONDS = 2.0


def silent_since(node: Node) -> datetime | None:
    """Since when a node is Unknown; None if it is not."""
    ready = node.condition("Ready")
    unknown = ready is not None and ready.status == "Unknown"
    return parse_time(ready.last_transition_time) if ready is not None and unknown else None


def heard_since(node: Node) -> datetime | None:
    """Since when a node is heard; None if it is Unknown, or has not said."""
    ready = node.condition("Ready")
    return None if ready is None or ready.status == "Unknown" else parse_time(ready.last_transition_time)


def heard_again(old: Node, new: Node) -> datetime | None:
    """When a node was heard again that had been Unknown; None if it was not.

    Or that may have been while the watch was behind: it is Ready since another time than before, in the same boot.
    """
    since, before = heard_since(new), heard_since(old)
    missed = before != since and _is_ready(old) and _is_ready(new) and new.is_machine(old.machine)
    return since if silent_since(old) is not None or missed else None


def _is_ready(node: Node) -> bool:
    ready = node.condition("Ready")
    return ready is not None and ready.status == "True"


def suspicion(seen: Observation, since: datetime | None, timers: Timers) -> Reason | None:
    """Why the silence of a node is not believed; None if it is. `since`: when it fell silent, as far as is known.

    Those that fell silent `LONG_BEFORE` tell nothing of it, and are not counted: as of machines that are gone, whose
    nodes nobody deletes. Unless no node at all is heard: in a long outage one is, for a moment, now and then.
    """
    back = seen.api_returned_seconds
    if back is not None and timers.pending(seen.now + PATIENCE - timedelta(seconds=back)):
        message = "the API server was away until a moment ago: nodes that are not heard are waited for"
        return Reason("ControlPlaneReturned", message)
    seconds = int(PATIENCE.total_seconds())
    recent, again = _recent(seen.silent_nodes, seen.now), _recent(seen.nodes_heard_again, seen.now)
    others_are_heard = len(seen.silent_nodes) < len(seen.nodes)
    old = bisect.bisect_left(seen.silent_nodes, since - LONG_BEFORE) if since and others_are_heard else 0
    nodes, silent = len(seen.nodes) - old, len(seen.silent_nodes) - old
    if silent and FEWEST <= silent + again > NEARLY_ALL * nodes:
        what = f"in the last {seconds} s nearly no node was heard all the time"
    elif recent >= FEWEST and recent > SHARE * nodes:
        what = f"many nodes turned Unknown within {seconds} s"
    else:
        return None
    timers.after(LOOK_AGAIN_SECONDS)
    words = "the control plane or its network is suspected, and nothing is done about silent nodes for now"
    return Reason("ManyNodesUnknown", f"{what}: {words}")


def _recent(changes: Sequence[datetime], now: datetime) -> int:
    """How many of them were a moment ago. What lies ahead was before this clock was set back."""
    return bisect.bisect_right(changes, now + TOLERATED) - bisect.bisect_right(changes, now - PATIENCE)
