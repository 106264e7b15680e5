"""Strategic merge of a user's pod template over Shoal's defaults, as `kubectl patch` does it.

Lists whose elements have a key (containers by name, ports by number and protocol, …) are merged by key; tolerations,
envFrom and affinities are appended, since they only add rules; nodes must match a term of the defaults and one of the
patch. Other lists are replaced. A null removes a default. What is of one kind only, such as a volume, is of the patch's
kind, without a null for that of the defaults: Kubernetes' "retain keys".
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

_KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "ephemeralContainers": ("name",),
    "volumes": ("name",),
    "env": ("name",),
    "imagePullSecrets": ("name",),
    "resourceClaims": ("name",),
    "ports": ("containerPort", "protocol"),
    "volumeMounts": ("mountPath",),
    "volumeDevices": ("devicePath",),
    "hostAliases": ("ip",),
    "topologySpreadConstraints": ("topologyKey", "whenUnsatisfiable"),
}
_OTHERWISE = {"protocol": "TCP", "whenUnsatisfiable": "DoNotSchedule"}
"""Parts of a key that may be left out."""
_BESIDE = {
    "volumes": frozenset({"name"}),
    "env": frozenset({"name"}),
    "readinessProbe": frozenset(
        {
            *(
                "initialDelaySeconds",
                "timeoutSeconds",
                "periodSeconds",
                "successThreshold",
                "failureThreshold",
            ),
            "terminationGracePeriodSeconds",
        }
    ),
}
"""The fields of what is of one kind only (a source, a value, a way to probe) beside the one that says which."""
_APPENDED = frozenset(
    {
        "tolerations",
        "envFrom",
        "preferredDuringSchedulingIgnoredDuringExecution",
        "requiredDuringSchedulingIgnoredDuringExecution",  # of pods; that of nodes is an object
    }
)


def merge(defaults: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """`patch` merged over `defaults`; neither is modified."""
    merged = dict(defaults)
    for field, value in patch.items():
        if value is None:
            merged.pop(field, None)
        elif isinstance(value, dict) and isinstance(merged.get(field), dict):
            merged[field] = _over(field, merged[field], value)
        elif isinstance(value, list) and isinstance(merged.get(field), list):
            merged[field] = _merge_lists(field, merged[field], value)
        else:
            merged[field] = value
    return merged


def _merge_lists(field: str, defaults: list[Any], patch: list[Any]) -> list[Any]:
    if field in _APPENDED:
        return [*defaults, *(value for value in patch if value not in defaults)]
    if not all(isinstance(value, dict) for value in patch):
        return patch  # for the API server to refuse
    if field == "nodeSelectorTerms":
        matching = [each for each in patch if each]  # an empty term matches no node
        return [both_terms(ours, theirs) for ours in defaults for theirs in matching] or patch or defaults
    key = _KEYS.get(field)
    if key is None:
        return patch
    ours, theirs = ({_key(key, value): value for value in values} for values in (defaults, patch))
    if None in theirs:
        return patch
    merged = {each: _over(field, ours.get(each, {}), value) for each, value in theirs.items()}
    return [*(ours | merged).values()]


def _key(parts: tuple[str, ...], value: dict[str, Any]) -> Hashable | None:
    """What tells an element from the others of its list; None: nothing does."""
    key = tuple(value.get(part, _OTHERWISE.get(part)) for part in parts)
    return key if all(isinstance(part, str | int) for part in key) else None


def _over(field: str, defaults: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    beside = _BESIDE.get(field)
    if beside is not None and any(name not in beside and said is not None for name, said in patch.items()):
        defaults = {name: said for name, said in defaults.items() if name in beside or name in patch}
    return merge(defaults, patch)


def both_terms(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A node selector term that matches what both match. Terms are alternatives, their expressions are not."""
    parts = ("matchExpressions", "matchFields")
    both = {part: [*(ours.get(part) or []), *(theirs.get(part) or [])] for part in parts}
    return {part: found for part, found in both.items() if found}
