"""Strategic merge of a user's pod template over Shoal's defaults, as `kubectl patch` does it.

Lists whose elements have a key (containers by name, ports by containerPort, …) are merged by key; tolerations, envFrom
and preferences are appended; other lists are replaced. A null removes a default.
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
_APPENDED = frozenset({"tolerations", "envFrom", "preferredDuringSchedulingIgnoredDuringExecution"})


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
    key = _KEYS.get(field)
    if key is None or not all(isinstance(v, dict) and isinstance(v.get(key), str | int) for v in patch):
        return patch
    by_key = {value[key]: value for value in defaults}
    for value in patch:
        by_key[value[key]] = merge(by_key[value[key]], value) if value[key] in by_key else value
    return list(by_key.values())
