"""What pods ask for and nodes have, as the API server says it."""

from __future__ import annotations

import json
from collections import Counter
from decimal import Decimal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.api.amounts import fits, nodes_for, part_of, quantity
from shoal.api.kube import Node, Pod

UNITS = {
    "n": -9,
    "u": -6,
    "m": -3,
    "": 0,
    "k": 3,
    "M": 6,
    "G": 9,
    "T": 12,
    "P": 15,
    "E": 18,
    "e2": 2,
    "E-3": -3,
}


@given(st.decimals(0, 10**6, places=3), st.sampled_from(sorted(UNITS)))
def test_quantity_has_the_value_that_kubernetes_gives_it(number: Decimal, unit: str) -> None:
    value = float(number * Decimal(10) ** UNITS[unit])
    assert quantity(f"{number}{unit}") == pytest.approx(min(max(value, 1e-9), 2.0**63) if value else 0.0)


@pytest.mark.parametrize(
    ("text", "value"), [("3920m", 3.92), ("16Ki", 16384), ("2Gi", 2**31), (".5", 0.5), (4, 4), ("nan", 0), ("x", 0),
    ("-5", 0), ("1e400", 0)]
)  # fmt: skip
def test_quantity_of_any_form(text: object, value: float) -> None:
    assert quantity(text) == value


def pod(*resources: object) -> Pod:
    containers = [{"name": "c", "resources": each} for each in resources]
    return Pod.model_validate({"metadata": {"name": "p"}, "spec": {"containers": containers}})


def test_sum_of_what_containers_ask_for_is_a_number_however_large_they_are() -> None:
    """A part of a node without limit was none, and ended the look at its pool."""
    asked = pod(*[{"requests": {"memory": "1" + "0" * 308}}] * 16).spec.requests
    assert nodes_for({asked: 1}, (("memory", float("inf")),)) == 1


def node(**has: str) -> Node:
    return Node.model_validate({"metadata": {"name": "n"}, "status": {"allocatable": has}})


def test_pod_asks_for_what_its_containers_do_together_and_for_a_limit_that_nothing_else_is_asked_of() -> None:
    asked = pod(
        {"requests": {"cpu": "500m"}, "limits": {"cpu": "2", "gpu": "1"}}, {"requests": {"cpu": "1"}}, None
    )
    assert asked.spec.requests == (("cpu", 1.5), ("gpu", 1.0))
    assert Pod.model_validate(asked.model_dump()).spec == asked.spec


ONE, TWO, SIX = ({"requests": {"cpu": cpu}} for cpu in ("1", "2", "6"))


@pytest.mark.parametrize(
    ("spec", "cores"),
    [
        ({"initContainers": [{"resources": ONE}, {"resources": SIX}]}, 6),
        ({"initContainers": [{"resources": ONE}]}, 2),
        ({"initContainers": [{"resources": ONE, "restartPolicy": "Always"}]}, 3),
        ({"initContainers": [{"resources": TWO, "restartPolicy": "Always"}, {"resources": SIX}]}, 8),
        ({"initContainers": [{"resources": SIX}, {"resources": TWO, "restartPolicy": "Always"}]}, 6),
        ({"initContainers": [{"resources": SIX}], "overhead": {"cpu": "500m"}}, 6.5),
        ({"resources": {"requests": {"cpu": "3"}}, "overhead": {"cpu": "500m"}}, 3.5),
        ({"resources": {"limits": {"cpu": "8"}}}, 2),
        ({"resources": {"limits": {"cpu": "8"}}, "containers": [{"name": "c"}]}, 8),
        ({"resources": {"requests": {"nvidia.com/gpu": "8"}}}, 2),
    ],
    ids=[
        "the largest init container",
        "one that is smaller than all that follow",
        "a sidecar",
        "an init container beside a sidecar",
        "an init container before a sidecar",
        "overhead",
        "what the pod says",
        "a limit of the pod above what its containers ask for",
        "a limit of the pod where they ask for nothing",
        "what no pod says as a whole",
    ],
)
def test_pod_asks_for_what_the_scheduler_counts(spec: dict[str, object], cores: float) -> None:
    body = {"containers": [{"name": "c", "resources": TWO}], **spec}
    asked = Pod.model_validate_json(json.dumps({"metadata": {"name": "p"}, "spec": body})).spec.requests
    assert dict(asked) == {"cpu": cores}


def test_pod_fits_a_node_that_has_all_that_it_asks_for() -> None:
    asked = pod({"requests": {"cpu": "2", "memory": "4Gi"}}).spec.requests
    for has, part in (
        ({"cpu": "2", "memory": "4Gi"}, 1.0),
        ({"cpu": "8", "memory": "16Gi"}, 0.25),
        ({"cpu": "8", "memory": "2Gi"}, 2.0),
        ({"cpu": "8"}, float("inf")),
        ({}, 0.0),  # it does not say
    ):
        room = node(**has).status.allocatable
        assert (part_of(asked, room), fits(asked, room)) == (part, part <= 1)
    assert fits((), node(cpu="1").status.allocatable)


@pytest.mark.parametrize(
    ("cores", "has", "nodes"),
    [
        (["1e-320"] * 20, {"cpu": "4"}, 1),
        (["1e308"] * 20, {"cpu": "4"}, 20),
        (["1"] * 20, {"cpu": "3920m"}, 7),
        (["2"] * 20, {"cpu": "3920m"}, 20),
        (["100m"] * 20, {"cpu": "2"}, 1),
        (["1", "2"] * 4, {"cpu": "4"}, 3),
        (["1"] * 20, {}, 1),
        (["0"] * 20, {"cpu": "4"}, 1),
        (["8"] * 2, {"cpu": "4"}, 2),
    ],
    ids=[
        "next to nothing",
        "more than there is anywhere",
        "three on a node",
        "one on a node",
        "all on one",
        "of two kinds",
        "nobody knows",
        "they ask for nothing",
        "too large",
    ],
)
def test_pods_need_as_few_nodes_as_have_room_for_them(
    cores: list[str], has: dict[str, str], nodes: int
) -> None:
    asked = [pod({"requests": {"cpu": each}}).spec.requests for each in cores]
    assert nodes_for(Counter(asked), node(**has).status.allocatable) == nodes
