"""What the rules of a pod's spec say of the nodes that may take it, by the names of labels and not their values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HOSTNAME, _REQUIRED = "kubernetes.io/hostname", "requiredDuringSchedulingIgnoredDuringExecution"


def apart_by(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of nodes by each of which a pod is not to be beside some others.

    A rule of the host is left out beside the same rule of another label: that keeps it from more.
    """
    anti: Mapping[str, Any] = (spec.get("affinity") or {}).get("podAntiAffinity") or {}
    rules = [*(anti.get(_REQUIRED) or ())]
    wider = [each for each in rules if each.get("topologyKey") != _HOSTNAME]
    rules = [
        each for each in rules if each in wider or not any(_is_of_the_same(each, rule) for rule in wider)
    ]
    spread = spec.get("topologySpreadConstraints") or ()
    rules += [each for each in spread if each.get("whenUnsatisfiable") == "DoNotSchedule"]
    return tuple(sorted({str(each.get("topologyKey")) for each in rules}))


def _is_of_the_same(rule: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether both keep it from the same pods."""
    return {**rule, "topologyKey": ""} == {**other, "topologyKey": ""}


def picks_by(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels and fields that its node has to have as a pod says."""
    affinity: Mapping[str, Any] = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    terms = (affinity.get(_REQUIRED) or {}).get("nodeSelectorTerms") or ()
    rules = (
        rule
        for term in terms
        for rule in (*(term.get("matchExpressions") or ()), *(term.get("matchFields") or ()))
    )
    picked = {str(rule.get("key")) for rule in rules if rule.get("operator") not in {"NotIn", "DoesNotExist"}}
    return tuple(sorted(picked | {*(spec.get("nodeSelector") or ())}))
