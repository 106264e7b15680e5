"""What an installation says of its nodes, in variables of the operator's Deployment.

The operator reads them as its own, and `shoal doctor` in the Deployment.
"""

from __future__ import annotations

from collections.abc import Mapping

from shoal.errors import UsageError
from shoal.manifests.platforms import Platform


def labels_of(environment: Mapping[str, str], name: str) -> dict[str, str]:
    """A variable such as `kubernetes.io/arch=amd64,kubernetes.io/os=linux`."""
    pairs = [each.partition("=") for each in environment.get(name, "").split(",") if each.strip()]
    if wrong := ["".join(pair) for pair in pairs if not (pair[0].strip() and pair[1])]:
        raise UsageError(f"{name}: {wrong[0]!r} must be label=value")
    return {key.strip(): value.strip() for key, _, value in pairs}


def own_spot_of(environment: Mapping[str, str]) -> Platform:
    """Spot nodes of labels and taints of its own."""
    labels = labels_of(environment, "SHOAL_SPOT_LABELS")
    taints = labels_of(environment, "SHOAL_SPOT_TAINTS")
    return Platform("own", spot={key: (value,) for key, value in labels.items()}, taints=taints)
