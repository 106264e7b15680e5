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
DNS, API_SERVER = 53, {443, 6443}
EVERY_PORT = (DNS, *sorted(API_SERVER), *range(7000, 8100))


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
    let_out = _open(policies, "Egress", source, target, target)
    return let_out & _open(policies, "Ingress", target, source, target)


def _open(policies: Sequence[Json], way: str, selected: Peer, other: Peer, target: Peer) -> set[int]:
    """The ports of `target` that the policies of one end open to, or from, the other end."""
    selecting = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == selected.namespace
        and matches(policy["spec"]["podSelector"], selected.labels)
        and way in policy["spec"]["policyTypes"]
    ]
    if not selecting:
        return set(EVERY_PORT)
    rules = [rule for spec in selecting for rule in spec.get(way.lower(), ())]
    peers = "from" if way == "Ingress" else "to"
    admitted = [rule for rule in rules if _is_one_of(rule.get(peers), other, selected)]
    return {port for port in EVERY_PORT for rule in admitted if _is_to(rule.get("ports"), port, target)}


def _is_one_of(peers: Sequence[Json] | None, other: Peer, selected: Peer) -> bool:
    if not peers:
        return True
    for each in peers:
        assert each.keys() <= {"podSelector", "namespaceSelector"}
        there = {"kubernetes.io/metadata.name": other.namespace}
        namespaces = each.get("namespaceSelector")
        near = other.namespace == selected.namespace if namespaces is None else matches(namespaces, there)
        if near and matches(each.get("podSelector", {}), other.labels):
            return True
    return False


def _is_to(ports: Sequence[Json] | None, port: int, target: Peer) -> bool:
    if not ports:
        return True
    named = (each["port"] for each in ports)  # without `endPort`, which not every plugin knows
    return port in {target.ports.get(each, -1) if isinstance(each, str) else each for each in named}


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
    settings = (
        "networkPolicy.enabled=true",
        "networkPolicy.egress.enabled=true",
        "pools.enabled=true",
        "networkPolicy.from[0].namespaceSelector.matchLabels.kubernetes\\.io/metadata\\.name=monitoring",
        "networkPolicy.from[1].podSelector.matchLabels.app=own-prometheus",
        f"networkPolicy.jobNamespaces={{{namespace}}}",
        "networkPolicy.jobEgress.enabled=true",
        "networkPolicy.jobEgress.rules[0].ports[0].port=443",
    )
    objects = rendered(control_plane, HOME, *settings)
    templates = {
        each["metadata"]["name"]: Peer.of(each["spec"]["template"], HOME)
        for each in objects
        if each["kind"] == "Deployment"
    }
    operator, pools = templates["shoal"], templates["shoal-pools"]
    stranger = Peer(namespace, {"app": "web"}, {})
    elsewhere = Peer("other-team", worker.labels, {})
    prometheus = Peer("monitoring", {"app": "prometheus"}, {})
    beside = Peer(HOME, {"app": "own-prometheus"}, {})  # in the operator's namespace
    outside = Peer("", {}, {})

    of_processes, [of_jobs] = [], [await created(kube, namespace, documented())]
    for each in (each for each in objects if each["kind"] == "NetworkPolicy"):
        home, each["metadata"]["namespace"] = each["metadata"]["namespace"], namespace
        stored = await created(kube, namespace, each)
        stored["metadata"]["namespace"] = home
        of_processes.append(stored)
    in_chart = [each for each in of_processes if each["metadata"]["namespace"] == namespace]
    of_chart, leaving = sorted(in_chart, key=lambda each: each["spec"]["policyTypes"] == ["Egress"])
    of_processes = [each for each in of_processes if each not in in_chart]

    of_a_server = {DATA_PORT, CONTROL_PORT, METRICS_PORT}
    assert set(server.ports.values()) <= of_a_server
    assert worker.ports == {}
    for policy in (of_jobs, of_chart):
        policies = [*of_processes, policy]
        inside = [admits(policies, each, server) for each in (worker, server, elsewhere)]
        assert inside == [of_a_server, of_a_server, set()]  # also of one shard, from another
        others = [admits(policies, each, server) for each in (operator, prometheus, stranger)]
        assert others == [{CONTROL_PORT}, {METRICS_PORT}, set()]
        assert admits(policies, stranger, worker) == set(EVERY_PORT)  # a worker listens on none
    assert admits([of_chart], pools, server) == set()
    assert admits([of_chart], beside, server) == {METRICS_PORT}
    assert admits([of_chart], Peer(namespace, beside.labels, {}), server) == set()

    for of_job in (server, worker):
        reached = [admits([of_chart, leaving], of_job, other) for other in (server, outside, elsewhere)]
        assert reached == [of_a_server, {DNS, 443}, {DNS, 443}]
    assert admits([leaving], stranger, outside) == set(EVERY_PORT)

    policies = of_processes
    [check] = [Peer(HOME, each["metadata"]["labels"], {}) for each in objects if each["kind"] == "Pod"]
    assert admits(policies, check, operator) == {operator.ports["metrics"], operator.ports["health"]}
    for ours in (operator, pools):
        assert admits(policies, stranger, ours) == {ours.ports["health"]}
        assert admits(policies, prometheus, ours) == {ours.ports["metrics"], ours.ports["health"]}
        assert admits(policies, ours, outside) == {DNS, *API_SERVER}
        assert admits(policies, ours, worker) == {DNS, *API_SERVER}
    assert admits(policies, operator, server) == {DNS, *API_SERVER, CONTROL_PORT}
    assert admits(policies, pools, server) == {DNS, *API_SERVER}


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
