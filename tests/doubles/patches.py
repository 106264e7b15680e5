"""What an API server makes of patches."""

from __future__ import annotations

import json
from typing import Any

Json = dict[str, Any]


def json_patched(old: Json, operations: list[Json]) -> Json | None:
    """The object after a JSON patch of `test` and `replace`; None if a test fails."""
    fresh: Json = json.loads(json.dumps(old))
    for each in operations:
        *folders, name = each["path"].strip("/").split("/")
        where = fresh
        for folder in folders:
            where = where[folder]
        if each["op"] == "replace":
            where[name] = each["value"]
        elif where[name] != each["value"]:
            return None
    return fresh


def merged(old: Any, patch: Any) -> Any:
    """The object after a JSON merge patch."""
    if not isinstance(patch, dict) or not isinstance(old, dict):
        return patch
    both = {**old, **{key: merged(old.get(key), value) for key, value in patch.items()}}
    return {key: value for key, value in both.items() if value is not None}
