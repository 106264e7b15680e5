"""What pods ask for of each resource and nodes have, as numbers: whether a pod fits, and how many nodes some need."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

Amounts = tuple[tuple[str, float], ...]
"""By the name of the resource, in order: equal ones are shared."""
NVIDIA = "nvidia.com/"
"""Of every resource of NVIDIA's device plugin, such as a part of a GPU (`nvidia.com/mig-1g.5gb`)."""

_UNITS = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "k": 1e3, "": 1.0}
_UNITS |= {each: 1e3 ** (power + 2) for power, each in enumerate("MGTPE")}
_UNITS |= {f"{each}i": 1024.0 ** (power + 1) for power, each in enumerate("KMGTPE")}
_ROUNDED = 1e-9
_LEAST, _MOST = 1e-9, 2.0**63
"""Kubernetes rounds what is less up to this, and what is more down: sums and quotients of quantities are numbers."""
_OF_PODS = ("cpu", "memory", "hugepages-")
"""Of these a pod may say what it asks for as a whole (`IsSupportedPodLevelResource`)."""


def quantity(text: object) -> float:
    """A Kubernetes quantity as a number; 0 for what is none, or is negative."""
    number = str(text)
    unit = number.lstrip("+-.0123456789")
    if unit in _UNITS:
        number = number[: len(number) - len(unit)]
    try:
        found = float(number) * _UNITS.get(unit, 1.0)  # else it has an exponent, or is none
    except ValueError:
        return 0.0
    return min(max(found, _LEAST), _MOST) if 0.0 < found < math.inf else 0.0


def amounts_of(found: object) -> object:
    """What a node has, as the API server says it."""
    if not isinstance(found, Mapping):
        return found
    return tuple(sorted((str(name), quantity(text)) for name, text in found.items()))


def requested_by(spec: Mapping[str, Any]) -> Amounts:
    """What a pod asks for, as the scheduler counts it (`PodRequests` in k8s.io/component-helpers/resource).

    Its containers together; or what one init container does, if that is more, beside the init containers before it that
    go on (`restartPolicy: Always`), which count with the containers, too. What the pod itself says of CPU, memory and
    huge pages (`spec.resources`) is in place of that; its overhead comes on top.

    Args:
        spec: of the pod, with the parts that matter.

    """
    total, most = defaultdict[str, float](float), defaultdict[str, float](float)
    for each in _list(spec.get("initContainers")):
        for name, amount in _asked(each.get("resources")).items():
            now = total[name] + amount
            most[name] = max(most[name], now)
            if each.get("restartPolicy") == "Always":
                total[name] = now
    for each in _list(spec.get("containers")):
        for name, amount in _asked(each.get("resources")).items():
            total[name] += amount
    for name, amount in most.items():
        total[name] = max(total[name], amount)
    of_pod: Mapping[str, Any] = spec.get("resources") or {}
    whole = {name: quantity(text) for name, text in (of_pod.get("limits") or {}).items() if name not in total}
    whole |= {name: quantity(text) for name, text in (of_pod.get("requests") or {}).items()}
    total |= {name: amount for name, amount in whole.items() if name.startswith(_OF_PODS)}
    for name, text in (spec.get("overhead") or {}).items():
        total[name] += quantity(text)
    return tuple(sorted(total.items()))


def _list(found: object) -> list[Mapping[str, Any]]:
    return found if isinstance(found, list) else []


def _asked(resources: Mapping[str, Any] | None) -> dict[str, float]:
    """What a container asks for: as much as a limit where that is all."""
    found = resources or {}
    asked = {**(found.get("limits") or {}), **(found.get("requests") or {})}
    return {name: quantity(text) for name, text in asked.items()}


def part_of(asked: Amounts, has: Amounts) -> float:
    """Which part of a node a pod takes: more than 1 if it does not fit; 0 while the node does not say what it has."""
    room = dict(has)
    parts = (amount / room[name] if room.get(name) else math.inf for name, amount in asked if amount > 0)
    return max(parts, default=0.0) if has else 0.0


def covers(one: Amounts, other: Amounts) -> bool:
    """Whether it is at least as much of each."""
    has = dict(one)
    return all(amount <= has.get(name, 0.0) + _ROUNDED for name, amount in other)


def fits(asked: Amounts, has: Amounts) -> bool:
    """Whether an empty node has as much, as far as it says what it has."""
    return part_of(asked, has) <= 1.0 + _ROUNDED


def nodes_for(pods: Mapping[Amounts, int], has: Amounts) -> int:
    """How many nodes these pods need, as many of one kind on each as it has room for; at least 1.

    Args:
        pods: how many there are of those that ask for so much.
        has: a node.

    """
    parts = ((part, count) for asked, count in pods.items() if (part := part_of(asked, has)))
    needed = sum(count / max(1, math.floor(1.0 / part + _ROUNDED)) for part, count in parts)
    return max(1, math.ceil(needed - _ROUNDED))


def left_of(has: Amounts, pods: Iterable[Amounts]) -> Amounts:
    """What a node has left beside these pods."""
    left = dict(has)
    for name, amount in (each for asked in pods for each in asked):
        if name in left:
            left[name] -= amount
    return tuple((name, max(0.0, amount)) for name, amount in left.items())
