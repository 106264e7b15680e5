"""Whether nodes that are not heard are to be believed gone, or the control plane is to be suspected first.

When the API server, its load balancer or a network between them pauses, all kubelets are silent at once while their
pods run on. Kubernetes' own node controller then evicts nothing (`FullDisruption`), and neither does Shoal.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from datetime import datetime, timedelta

from shoal.api.kube import Node
from shoal.policy.common.timers import Timers
from shoal.policy.common.times import parse_time
from shoal.policy.model import Reason

SHARE = 0.2
FEWEST = 3
"""More than this share of the nodes, and at least so many: fewer may go at once by chance."""
PATIENCE = timedelta(seconds=60)
"""How long such nodes are waited for."""
LOOK_AGAIN_SECONDS = 2.0


def silent_since(node: Node) -> datetime | None:
    """Since when a node is Unknown; None if it is not."""
    ready = node.condition("Ready")
    unknown = ready is not None and ready.status == "Unknown"
    return parse_time(ready.last_transition_time) if ready is not None and unknown else None


def suspicion(
    nodes: int, silent: Sequence[datetime], now: datetime, api_returned_at: datetime | None, timers: Timers
) -> Reason | None:
    """Why the nodes' silence is not believed; None if it is.

    `nodes`: how many there are; `silent`: since when those are that are Unknown, the earliest first.
    """
    if api_returned_at is not None and timers.pending(api_returned_at + PATIENCE):
        message = "the API server was away until a moment ago: nodes that are not heard are waited for"
        return Reason("ControlPlaneReturned", message)
    recent = len(silent) - bisect.bisect_right(silent, now - PATIENCE)
    if recent < FEWEST or recent <= SHARE * nodes:
        return None
    timers.after(LOOK_AGAIN_SECONDS)
    seconds = int(PATIENCE.total_seconds())
    return Reason(
        "ManyNodesUnknown",
        f"many nodes turned Unknown within {seconds} s: the control plane or its network is suspected, and nothing is"
        " done about them for now",
    )
