"""Strategic merge of a user's pod template over Shoal's defaults, as `kubectl patch` does it.

Lists whose elements have a key (containers by name, ports by containerPort, …) are merged by key; tolerations, envFrom
and affinities are appended, since they only add rules; nodes must match a term of the defaults and one of the patch.
Other lists are replaced. A null removes a default.
"""

from __future__ import annotations

from typing import Any

_KEYS = {
    "containers": "name",
    "initContainers": "name",
    "ephemeralContainers": "name",
    "volumes": "name",
    "env": "name",
    "imagePullSecrets": "name",
    "resourceClaims": "name",
    "ports": "containerPort",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
}
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
            merged[field] = merge(merged[field], value)
        elif isinstance(value, list) and isinstance(merged.get(field), list):
            merged[field] = _merge_lists(field, merged[field], value)
        else:
            merged[field] = value
    return merged


def _merge_lists(field: str, defaults: list[Any], patch: list[Any]) -> list[Any]:
    if field in _APPENDED:
        return [*defaults, *(value for value in patch if value not in defaults)]
    if field == "nodeSelectorTerms":
        return [both_terms(ours, theirs) for ours in defaults for theirs in patch] or defaults or patch
    key = _KEYS.get(field)
    if key is None or not all(isinstance(v, dict) and isinstance(v.get(key), str | int) for v in patch):
        return patch
    by_key = {value[key]: value for value in defaults}
    for value in patch:
        by_key[value[key]] = merge(by_key[value[key]], value) if value[key] in by_key else value
    return list(by_key.values())


def both_terms(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
    """A node selector term that matches what both match. Terms are alternatives, their expressions are not."""
    parts = ("matchExpressions", "matchFields")
    both = {part: [*(ours.get(part) or []), *(theirs.get(part) or [])] for part in parts}
    return {part: found for part, found in both.items() if found}
