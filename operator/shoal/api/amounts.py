"""What pods ask for of each resource and nodes have, as numbers: whether a pod fits, and how many nodes some need."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

Amounts = tuple[tuple[str, float], ...]
"""By the name of the resource, in order: equal ones are shared."""

_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "": 1.0}
_UNITS |= {each: 1e3 ** (power + 2) for power, each in enumerate("MGTPE")}
_UNITS |= {f"{each}i": 1024.0 ** (power + 1) for power, each in enumerate("KMGTPE")}
_ROUNDED = 1e-9


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number; 0 for what is none."""
    number = str(text)
    unit = number.lstrip("+-.0123456789")
    if unit in _UNITS:
        number = number[: len(number) - len(unit)]
    try:
        found = float(number) * _UNITS.get(unit, 1.0)  # else it has an exponent, or is none
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


def amounts_of(found: object) -> object:
    """What a node has, as the API server says it."""
    if not isinstance(found, Mapping):
        return found
    return tuple(sorted((str(name), quantity(text)) for name, text in found.items()))


def requested(containers: object) -> object:
    """`requested_by` of containers, as the API server says them; what is none stays."""
    return requested_by(containers) if isinstance(containers, list) else containers


def requested_by(containers: Iterable[Mapping[str, Any]]) -> Amounts:
    """What the containers of a pod ask for together: as much as a limit where that is all.

    Init containers are left out: a pod needs no less for them.
    """
    total = dict[str, float]()
    for each in containers:
        resources: Mapping[str, Any] = each.get("resources") or {}
        asked = {**(resources.get("limits") or {}), **(resources.get("requests") or {})}
        for name, text in asked.items():
            total[name] = total.get(name, 0.0) + quantity(text)
    return tuple(sorted(total.items()))


def part_of(asked: Amounts, has: Amounts) -> float:
    """Which part of a node a pod takes: more than 1 if it does not fit; 0 while the node does not say what it has."""
    room = dict(has)
    parts = (amount / room[name] if room.get(name) else math.inf for name, amount in asked if amount > 0)
    return max(parts, default=0.0) if has else 0.0


def fits(asked: Amounts, has: Amounts) -> bool:
    """Whether an empty node has as much, as far as it says what it has."""
    return part_of(asked, has) <= 1.0 + _ROUNDED


def nodes_for(pods: Iterable[Amounts], has: Amounts) -> int:
    """How many nodes these pods need, as many of one kind on each as it has room for; at least 1."""
    parts = [part for each in pods if (part := part_of(each, has))]
    return max(
        1, math.ceil(sum(1.0 / max(1, math.floor(1.0 / part + _ROUNDED)) for part in parts) - _ROUNDED)
    )


def left_of(has: Amounts, pods: Iterable[Amounts]) -> Amounts:
    """What a node has left beside these pods."""
    left = dict(has)
    for name, amount in (each for asked in pods for each in asked):
        if name in left:
            left[name] -= amount
    return tuple((name, max(0.0, amount)) for name, amount in left.items())
