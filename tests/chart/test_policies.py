"""Whom network policies let through, and what the admission policy holds."""

import json
from pathlib import Path
from typing import Any

import pytest

from shoal.api.base import API_VERSION
from shoal.api.kueue import KUEUE
from shoal.manifests.objects import POD_GROUPS
from shoal_trainer.contract import CONTROL_PORT, DATA_PORT, METRICS_PORT
from tests.chart.rendered import CHART, IMAGES_SET, flags, of_kind, ports_of, refusal, render, template


def test_network_policy_admits_every_port_of_the_operator(tools: Path) -> None:
    documents = render(tools, "networkPolicy.enabled=true", "page.enabled=true")
    [deployment], [policy] = of_kind(documents, "Deployment"), of_kind(documents, "NetworkPolicy")
    assert all("from" not in rule for rule in policy["spec"]["ingress"])
    admitted = {each["port"] for rule in policy["spec"]["ingress"] for each in rule["ports"]}
    assert admitted == ports_of(documents)
    assert policy["spec"]["podSelector"] == {"matchLabels": deployment["spec"]["selector"]["matchLabels"]}


@pytest.mark.parametrize("sets", [(), ("networkPolicy.from[0].podSelector.matchLabels.app=prometheus",)])
def test_network_policy_admits_the_pod_of_helm_test(tools: Path, sets: tuple[str, ...]) -> None:
    """Who may read metrics is named, and `helm test` reads them, too."""
    documents = render(tools, "networkPolicy.enabled=true", *sets)
    [policy], [check] = of_kind(documents, "NetworkPolicy"), of_kind(documents, "Pod")
    [rule] = [each for each in policy["spec"]["ingress"] if each["ports"] == [{"port": "metrics"}]]
    admitted = [
        each["podSelector"]["matchLabels"]
        for each in rule.get("from", [{"podSelector": {"matchLabels": {}}}])
    ]
    assert any(labels.items() <= check["metadata"]["labels"].items() for labels in admitted)
    operator = of_kind(documents, "Deployment")[0]["spec"]["template"]["metadata"]["labels"]
    assert bool(sets) != any(labels.items() <= operator.items() for labels in admitted)


def test_network_policies_are_as_wide_as_the_values_say(tools: Path) -> None:
    """Whom the rules let through is tested on the control plane, with the labels of a job."""
    assert len(of_kind(render(tools, "networkPolicy.enabled=true"), "NetworkPolicy")) == 1
    sets = (
        "networkPolicy.enabled=true",
        "networkPolicy.jobNamespaces={a,b}",
        "scope.namespace=a",
        "networkPolicy.egress.enabled=true",
        "networkPolicy.egress.apiServer.cidrs={10.0.0.1/32,fd00::1/128}",
        "networkPolicy.egress.apiServer.ports={16443}",
        "networkPolicy.egress.rules[0].ports[0].port=988",
    )
    operator, *jobs = of_kind(render(tools, *sets), "NetworkPolicy")
    assert [each["metadata"]["namespace"] for each in jobs] == ["a", "b"]
    scraped = [rule for each in jobs for rule in each["spec"]["ingress"] if rule["ports"] == [{"port": 7072}]]
    assert scraped == [{"ports": [{"port": 7072}]}] * 2  # by everybody, as nobody is named
    _, api_server, more, coordinators = operator["spec"]["egress"]
    assert api_server == {
        "ports": [{"port": 16443}],
        "to": [{"ipBlock": {"cidr": "10.0.0.1/32"}}, {"ipBlock": {"cidr": "fd00::1/128"}}],
    }
    [peer] = coordinators["to"]
    assert peer["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "a"}}
    assert more == {"ports": [{"port": 988}]}
    for wrong in ("jobNamespaces={A_b}", "egress.apiServer.cidrs={10.0.0.1}", "egress.apiServer.ports={}"):
        assert "schema" in refusal(tools, f"networkPolicy.{wrong}")


def test_each_port_of_a_job_is_named(tools: Path) -> None:
    """Of a range a plugin that does not know `endPort` opens the first port, such as Cilium before 1.16."""
    sets = (
        "networkPolicy.enabled=true",
        "networkPolicy.jobNamespaces={a}",
        "networkPolicy.jobEgress.enabled=true",
    )
    _, servers, leaving = of_kind(render(tools, *sets), "NetworkPolicy")
    every = [{"port": port} for port in (DATA_PORT, CONTROL_PORT, METRICS_PORT)]
    assert [servers["spec"]["ingress"][0]["ports"], leaving["spec"]["egress"][1]["ports"]] == [every, every]


PROMETHEUS = {"podSelector": {"matchLabels": {"app": "prometheus"}}}


@pytest.mark.parametrize(
    "peer",
    [
        {**PROMETHEUS, "namespaceSelector": {"matchLabels": {"team": "observability"}}},
        {**PROMETHEUS, "namespaceSelector": {"matchExpressions": [{"key": "team", "operator": "Exists"}]}},
        {**PROMETHEUS, "namespaceSelector": {}},
        {"namespaceSelector": {}},
        {"ipBlock": {"cidr": "10.0.0.0/8"}},
        PROMETHEUS,
    ],
    ids=["label", "expression", "any namespace", "every pod", "addresses", "no namespace"],
)
def test_jobs_are_read_by_whom_the_operator_is_read(tools: Path, peer: dict[str, Any]) -> None:
    """But a peer without a namespace is in that of its policy, and the release's is meant."""
    settings = (
        *flags(
            *IMAGES_SET, "crds.install=false", "networkPolicy.enabled=true", "networkPolicy.jobNamespaces={a}"
        ),
        *("--set-json", f"networkPolicy.from={json.dumps([peer])}"),
    )
    operator, servers = of_kind(
        template(tools, "shoal", str(CHART), "--namespace=home", *settings), "NetworkPolicy"
    )
    [admitted, _check] = operator["spec"]["ingress"][1]["from"]
    assert admitted == peer
    home = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "home"}}}
    assert servers["spec"]["ingress"][2]["from"] == [{**peer, **home} if peer is PROMETHEUS else peer]


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "setting", ["networkPolicy.egress.enabled=true", "networkPolicy.jobNamespaces={team}"]
)
def test_network_policies_are_not_asked_for_in_vain(tools: Path, setting: str) -> None:
    """Nobody would notice that nothing is held."""
    assert "make no policy without networkPolicy.enabled: set it" in refusal(tools, setting)
    for more in (setting, "networkPolicy.egress=null", "networkPolicy.jobEgress=null"):
        assert of_kind(render(tools, "networkPolicy.enabled=true", more), "NetworkPolicy")
    unnamed = ("networkPolicy.enabled=true", "networkPolicy.jobEgress.enabled=true")
    assert "makes no policy without networkPolicy.jobNamespaces: name them" in refusal(tools, *unnamed)


def test_admission_policy_needs_kubernetes_1_30(tools: Path) -> None:
    assert "needs Kubernetes 1.30" in refusal(tools, "admissionPolicy.enabled=true", "--kube-version=1.29.9")


MAY_BE_WRITTEN_FREELY = {
    "trainingjobs",
    "trainingjobs/status",
    "speedprofiles/status",
    "capacitypools/status",
    "events",
}
"""What is Shoal's own, and what Kubernetes' controllers take no orders from."""


def test_admission_policy_holds_all_that_the_account_may_write(tools: Path) -> None:
    """And where it cannot be asked, nothing is admitted."""
    documents = render(tools, "admissionPolicy.enabled=true", "kueue.enabled=true", "scope.pools=true")
    [policy] = of_kind(documents, "ValidatingAdmissionPolicy")
    held = {
        (group, resource): (each["apiVersions"], sorted(each["operations"]))
        for each in policy["spec"]["matchConstraints"]["resourceRules"]
        for group in each["apiGroups"]
        for resource in each["resources"]
    }
    written = {
        (group, resource)
        for role in of_kind(documents, "ClusterRole")
        for rule in role["rules"]
        if {"create", "update", "patch", "delete"} & {*rule["verbs"]}
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        if resource not in MAY_BE_WRITTEN_FREELY
    }
    assert held.keys() == written
    versions = {group: value for (group, _), (value, _) in held.items()}
    assert versions == {
        "": ["v1"], "policy": ["v1"], "shoal.dev": [API_VERSION.partition("/")[2]],
        "kueue.x-k8s.io": [KUEUE.partition("/")[2]], "scheduling.x-k8s.io": [POD_GROUPS.partition("/")[2]],
    }  # fmt: skip
    operations = {resource: value for (_, resource), (_, value) in held.items()}
    assert operations.pop("speedprofiles") == ["DELETE"]
    assert all(each == ["CREATE", "DELETE", "UPDATE"] for each in operations.values())
    assert policy["spec"]["failurePolicy"] == "Fail"


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("scope", "open_"), [("", False), ("team-b", False), ("team-a", True)])
def test_admission_policy_opens_the_operators_namespace_only_where_its_jobs_are(
    tools: Path, scope: str, open_: bool
) -> None:
    documents = render(tools, "admissionPolicy.enabled=true", f"scope.namespace={scope}", namespace="team-a")
    [policy] = of_kind(documents, "ValidatingAdmissionPolicy")
    first = policy["spec"]["validations"][0]["expression"]
    assert ("'team-a'" not in first) == open_
    assert "'kube-system'" in first
