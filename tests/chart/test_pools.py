"""What `pools.enabled` adds: the process that sizes node pools, with no more rights than that."""

from pathlib import Path
from typing import Any

import pytest

from shoal.process.pools import PoolSettings
from tests.chart.rendered import (
    container_of,
    environment_of,
    granted,
    names_of,
    of_kind,
    pod_of,
    refusal,
    render,
)


def pools_only(tools: Path, *sets: str) -> list[dict[str, Any]]:
    """The objects that `pools.enabled` adds."""
    without = names_of(render(tools))
    return [d for d in render(tools, "pools.enabled=true", *sets) if not names_of([d]) & without]


def test_units_of_buffers_go_where_pods_of_jobs_go(tools: Path) -> None:
    documents = render(tools, "pools.enabled=true", "platform=eks", "spotTaints.example\\.com/spot=yes")
    settings = PoolSettings.from_environment(environment_of(documents, "shoal-pools"))
    assert settings.node_selector == {"kubernetes.io/arch": "amd64", "kubernetes.io/os": "linux"}
    assert (settings.platform.name, settings.platform.taints) == ("eks", {"example.com/spot": "yes"})


def test_pools_may_mount_the_credentials_that_their_environment_names(tools: Path) -> None:
    sets = (
        "pools.enabled=true",
        "pools.extraEnv[0].name=GOOGLE_APPLICATION_CREDENTIALS",
        "pools.extraEnv[0].value=/key/key.json",
        "pools.extraVolumes[0].name=key",
        "pools.extraVolumes[0].secret.secretName=key",
        "pools.extraVolumeMounts[0].name=key",
        "pools.extraVolumeMounts[0].mountPath=/key",
    )
    pod = pod_of(render(tools, *sets), "shoal-pools")
    assert {"name": "key", "secret": {"secretName": "key"}} in pod["volumes"]
    assert {"name": "key", "mountPath": "/key"} in pod["containers"][0]["volumeMounts"]


def test_pools_are_not_sized_where_the_operator_does_not_read_them(tools: Path) -> None:
    assert "pools.enabled needs scope.pools" in refusal(tools, "pools.enabled=true", "scope.pools=false")
    assert "pools.enabled needs scope.nodes" in refusal(tools, "pools.enabled=true", "scope.nodes=false")


@pytest.mark.parametrize("create", ["true", "false"])
@pytest.mark.parametrize("name", ["serviceAccount.name=shoal-pools", "pools.serviceAccount.name=shoal"])
def test_both_processes_have_no_account_in_common(tools: Path, name: str, create: str) -> None:
    """It would have the rights to create pods, and those to the cloud."""
    accounts = f"serviceAccount.create={create}", "serviceAccount.name=shoal", name
    assert "must differ" in refusal(tools, "pools.enabled=true", *accounts)
    assert render(tools, *accounts), "a value of what is off harms nobody"


def test_node_pools_are_left_alone_by_default(tools: Path) -> None:
    assert not [name for _, _, name in names_of(render(tools)) if name.endswith("-pools")]


def test_node_pools_are_sized_by_a_process_that_may_touch_no_pod(tools: Path) -> None:
    added = pools_only(tools)
    [deployment] = of_kind(added, "Deployment")
    pod = pod_of(added)
    assert container_of(added)["command"] == ["shoal-pools"]
    assert pod["serviceAccountName"] == "shoal-pools"
    assert pod["securityContext"]["runAsNonRoot"] is True
    rights = granted(added, "ClusterRole") | granted(added, "Role")
    assert rights == {
        *(("capacitypools", verb) for verb in ("list", "watch", "patch")),
        ("capacitypools/status", "patch"),
        *(("leases", verb) for verb in ("create", "get", "watch", "update", "patch")),
        *(("events", verb) for verb in ("create", "patch")),
    }
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        assert {b["subjects"][0]["name"] for b in of_kind(added, kind)} == {"shoal-pools"}
    [operator] = of_kind(render(tools), "Deployment")
    selectors = [d["spec"]["selector"]["matchLabels"] for d in (operator, deployment)]
    assert selectors[0] != selectors[1]


def test_node_pools_are_sized_by_the_pinned_image_too(tools: Path) -> None:
    digest = "sha256:" + "a" * 64
    container = container_of(pools_only(tools, f"image.digest={digest}"))
    assert container["image"] == f"r.io/operator@{digest}"


def test_each_named_target_may_be_scaled_and_nothing_else(tools: Path) -> None:
    targets = (
        "pools.targets[0].apiGroup=cluster.x-k8s.io,pools.targets[0].resource=machinedeployments,"
        "pools.targets[0].namespace=capi,pools.targets[0].names={a,b},"
        "pools.targets[1].apiGroup=karpenter.sh,pools.targets[1].resource=nodepools,pools.targets[1].names={c}"
    )
    added = pools_only(tools, targets)
    rules = {
        (role["metadata"].get("namespace", ""), rule["resources"][0]): (rule["resourceNames"], rule["verbs"])
        for role in (*of_kind(added, "Role"), *of_kind(added, "ClusterRole"))
        for rule in role["rules"]
        if rule["apiGroups"][0] in {"cluster.x-k8s.io", "karpenter.sh"}
    }
    assert rules == {
        ("capi", "machinedeployments"): (["a", "b"], ["get"]),
        ("capi", "machinedeployments/scale"): (["a", "b"], ["get", "patch"]),
        ("", "nodepools"): (["c"], ["get"]),
        ("", "nodepools/scale"): (["c"], ["get", "patch"]),
    }


def test_buffers_are_written_only_in_the_named_namespaces(tools: Path) -> None:
    roles = of_kind(pools_only(tools, "pools.bufferNamespaces={team-a,team-b}"), "Role")
    written = {
        r["metadata"]["namespace"] for r in roles if ("capacitybuffers", "patch") in granted([r], "Role")
    }
    assert written == {"team-a", "team-b"}


def test_service_account_of_the_pools_has_the_clouds_annotations(tools: Path) -> None:
    role = "arn:aws:iam::123456789012:role/pools"
    key = "pools.serviceAccount.annotations.eks\\.amazonaws\\.com/role-arn"
    [account] = of_kind(pools_only(tools, f"{key}={role}"), "ServiceAccount")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": role}


def test_pools_of_releases_in_two_namespaces_share_the_lease_and_no_object(tools: Path) -> None:
    """Two that led, each in its namespace, wrote every pool in turns."""
    settings = ["pools.enabled=true", "pools.bufferNamespaces={shared}"]
    one, two = (
        render(tools, *settings, f"scope.namespace=team-{team}", namespace=f"shoal-{team}") for team in "ab"
    )
    assert not names_of(one) & names_of(two)
    for documents in (one, two):
        named = environment_of(documents, "shoal-pools")
        settings_of = PoolSettings.from_environment({**named, "POD_NAMESPACE": "shoal-a"})
        [rights] = [
            rule
            for role in of_kind(documents, "Role")
            if role["metadata"]["namespace"] == settings_of.lease_namespace
            for rule in role["rules"]
            if "update" in rule["verbs"]
        ]
        assert rights["resourceNames"] == [settings_of.lease_name]
        assert (settings_of.lease_namespace, settings_of.lease_name) == ("default", "shoal-pools")
