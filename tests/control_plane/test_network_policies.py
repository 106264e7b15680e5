"""Whom the NetworkPolicies of chart and documentation let through, judged by the labels of a job that runs.

Nothing enforces them here: the local cluster's network is the CNI plugin `bridge`, which knows no policies. What a
plugin that enforces them does follows from labels and ports alone, as Kubernetes defines it: whoever is selected by a
policy receives only what some policy that selects it admits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from dev.paths import ROOT
from shoal_trainer.contract import CONTROL_PORT, DATA_PORT, METRICS_PORT
from tests.control_plane.installed import rendered
from tests.control_plane.operators import Job, running_operator
from tests.doubles.fake_kubelet import FakeKubelet

HOME = "shoal-system"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/{}/networkpolicies"
EVERY_PORT = range(7000, 8100)


@dataclass(frozen=True)
class Peer:
    """A pod, as a policy sees it."""

    namespace: str
    labels: Mapping[str, str]
    ports: Mapping[str, int]
    """By name."""

    @classmethod
    def of(cls, pod: Json, namespace: str) -> Peer:
        ports = {
            port["name"]: port["containerPort"]
            for container in pod["spec"]["containers"]
            for port in container.get("ports", ())
        }
        return cls(namespace, pod["metadata"].get("labels", {}), ports)


def matches(selector: Json, labels: Mapping[str, str]) -> bool:
    """A label selector: all of its labels and expressions."""
    for each in selector.get("matchExpressions", ()):
        has, values = each["key"] in labels, each.get("values", ())
        held = {
            "Exists": has,
            "DoesNotExist": not has,
            "In": has and labels.get(each["key"]) in values,
            "NotIn": not has or labels[each["key"]] not in values,
        }
        if not held[each["operator"]]:
            return False
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def admits(policies: Sequence[Json], source: Peer, target: Peer) -> set[int]:
    """The ports of `target` that `source` reaches."""
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == target.namespace
        and matches(policy["spec"]["podSelector"], target.labels)
        and "Ingress" in policy["spec"]["policyTypes"]
    ]
    if not selecting:
        return set(EVERY_PORT)
    rules = [rule for spec in selecting for rule in spec.get("ingress", ())]
    admitted = [rule for rule in rules if _is_from(rule.get("from"), source, target)]
    return {port for port in EVERY_PORT for rule in admitted if _is_to(rule.get("ports"), port, target)}


def _is_from(peers: Sequence[Json] | None, source: Peer, target: Peer) -> bool:
    if not peers:
        return True
    for each in peers:
        assert each.keys() <= {"podSelector", "namespaceSelector"}
        there = {"kubernetes.io/metadata.name": source.namespace}
        namespaces = each.get("namespaceSelector")
        near = source.namespace == target.namespace if namespaces is None else matches(namespaces, there)
        if near and matches(each.get("podSelector", {}), source.labels):
            return True
    return False


def _is_to(ports: Sequence[Json] | None, port: int, target: Peer) -> bool:
    if not ports:
        return True
    for each in ports:
        first = each["port"]
        number: int = target.ports.get(first, -1) if isinstance(first, str) else first
        if number <= port <= each.get("endPort", number):
            return True
    return False


def documented() -> Json:
    """The policy of a job's namespace, from the page that has people copy it."""
    page = (ROOT / "docs" / "operating.md").read_text()
    blocks = re.findall(r"```yaml\n(apiVersion: networking.+?)```", page, re.DOTALL)
    [policy] = (yaml.safe_load(each) for each in blocks)
    return dict(policy)


async def created(kube: Kube, namespace: str, policy: Json) -> Json:
    """As the API server stores it, with its defaults."""
    return await kube.create(POLICIES.format(namespace), policy)


async def test_policies_admit_whom_they_should_and_nobody_else(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet
) -> None:
    await fake_kubelet.add_node("safe-1")
    await fake_kubelet.add_node("spot-1", spot=True)
    job = Job(kube, namespace)
    async with running_operator(control_plane.kubeconfig, namespace):
        await job.apply()
        await job.runs()
        pods = await job.pods()
    server = Peer.of(pods["digits-ps-0-0"], namespace)
    worker = Peer.of(pods["digits-worker-0-0"], namespace)
    scraped = "networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring"
    objects = rendered(control_plane, namespace, "networkPolicy.enabled=true", "pools.enabled=true", scraped)
    of_chart = [each for each in objects if each["kind"] == "NetworkPolicy"]
    templates = {
        each["metadata"]["name"]: Peer.of(each["spec"]["template"], HOME)
        for each in objects
        if each["kind"] == "Deployment"
    }
    operator, pools = templates["shoal"], templates["shoal-pools"]
    stranger = Peer(namespace, {"app": "web"}, {})
    elsewhere = Peer("other-team", worker.labels, {})

    of_jobs = await created(kube, namespace, documented())
    policies = [of_jobs]
    for each in of_chart:
        stored = await created(kube, namespace, each)
        stored["metadata"]["namespace"] = HOME  # the release's, whichever it is
        policies.append(stored)

    of_a_server = {DATA_PORT, CONTROL_PORT, METRICS_PORT}
    assert admits(policies, worker, server) == of_a_server
    assert admits(policies, server, server) == of_a_server  # of one shard, from another
    assert admits(policies, operator, server) == of_a_server
    assert admits(policies, stranger, server) == set()
    assert admits(policies, Peer("monitoring", {"app": "prometheus"}, {}), server) == {METRICS_PORT}
    assert admits(policies, elsewhere, server) == set()
    assert admits(policies, stranger, worker) == set(EVERY_PORT)  # a worker listens on none
    assert worker.ports == {}
    assert set(server.ports.values()) <= of_a_server
    [check] = [Peer(HOME, each["metadata"]["labels"], {}) for each in objects if each["kind"] == "Pod"]
    assert admits(policies, check, operator) == {operator.ports["metrics"], operator.ports["health"]}
    for ours in (operator, pools):
        assert admits(policies, stranger, ours) == {ours.ports["health"]}
        prometheus = Peer("monitoring", {"app": "prometheus"}, {})
        assert admits(policies, prometheus, ours) == {ours.ports["metrics"], ours.ports["health"]}


def test_no_policy_selects_everything() -> None:
    """What a mistake in a selector would look like, so that the test above can fail."""
    pod = Peer("a", {"x": "1"}, {"web": 80})
    assert matches({}, pod.labels)
    assert not matches({"matchExpressions": [{"key": "x", "operator": "DoesNotExist"}]}, pod.labels)
    assert not matches({"matchExpressions": [{"key": "x", "operator": "NotIn", "values": ["1"]}]}, pod.labels)
    policy: dict[str, Any] = {
        "metadata": {"namespace": "a"},
        "spec": {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []},
    }
    assert admits([policy], pod, pod) == set()
    assert admits([], pod, pod) == set(EVERY_PORT)
