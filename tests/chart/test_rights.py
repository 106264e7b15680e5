"""Who may do what: the roles of the operator, of its users, and of `helm test`."""

import json
from pathlib import Path
from typing import Any

from dev.paths import ROOT
from tests.chart.rendered import environment_of, granted, of_kind, pod_of, render


def test_crds_are_part_of_the_release_and_kept_on_uninstall(tools: Path) -> None:
    crds = of_kind(render(tools, crds=True), "CustomResourceDefinition")
    assert [c["metadata"]["name"] for c in crds] == [
        path.stem.partition("_")[2] + ".shoal.dev" for path in sorted((ROOT / "crds").glob("*.yaml"))
    ]
    assert all(c["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep" for c in crds)
    assert of_kind(render(tools), "CustomResourceDefinition") == []


def test_no_secret_is_read_but_the_one_that_the_operator_makes_for_itself(tools: Path) -> None:
    """It used to be made by the chart, with a random part; it is read by name, in the release's namespace."""
    for sets, expected in (((), [["shoal-install-key"]]), (("installKey.existingSecret=mine",), [])):
        roles = [each for kind in ("ClusterRole", "Role") for each in of_kind(render(tools, *sets), kind)]
        reading = [
            (role, rule)
            for role in roles
            for rule in role["rules"]
            if "secrets" in rule["resources"] and set(rule["verbs"]) & {"get", "list", "watch", "*"}
        ]
        assert [rule.get("resourceNames") for _, rule in reading] == expected
        assert all(rule["verbs"] == ["get"] for _, rule in reading)
        assert all(
            (role["kind"], role["metadata"]["namespace"]) == ("Role", "shoal-system") for role, _ in reading
        )


def test_rbac_rules_have_no_wildcard(tools: Path) -> None:
    rules = [r for role in of_kind(render(tools), "ClusterRole") for r in role["rules"]]
    assert rules
    assert not [r for r in rules if "*" in r["verbs"] + r["resources"] + r["apiGroups"]]


def test_helm_test_asks_for_each_right_of_the_roles(tools: Path) -> None:
    for values in (
        (),
        ("scope.namespace=team-a", "kueue.enabled=true"),
        ("scope.nodes=false", "scope.pools=false"),
    ):

        def asked(documents: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
            [pod] = of_kind(documents, "Pod")
            [roles] = [
                json.loads(word.removeprefix("--roles="))
                for word in pod["spec"]["containers"][0]["command"]
                if word.startswith("--roles=")
            ]
            return [(role["namespace"], role["rules"]) for role in roles]

        documents = render(tools, *values)
        assert asked(documents) == asked(render(tools, "rbac.create=false", *values))
        roles = [d for d in documents if d["kind"] in {"Role", "ClusterRole"}]
        given = [(role["metadata"].get("namespace", ""), role["rules"]) for role in roles]
        assert sorted(asked(documents), key=str) == sorted(given, key=str)


def test_single_namespace_needs_a_role_and_access_to_nodes_and_pools(tools: Path) -> None:
    documents = render(tools, "scope.namespace=team-a")
    assert granted(documents, "ClusterRole") == {
        *(("nodes", verb) for verb in ("get", "list", "watch")),
        *(("capacitypools", verb) for verb in ("list", "watch")),
        ("capacitypools/status", "update"),
        ("priorityclasses", "list"),
    }
    assert ("pods", "create") in granted(documents, "Role")
    role = next(r for r in of_kind(documents, "Role") if r["metadata"]["name"] == "shoal")
    assert role["metadata"]["namespace"] == "team-a"


def test_without_access_to_nodes_and_pools_nothing_is_cluster_wide(tools: Path) -> None:
    documents = render(tools, "scope.namespace=team-a", "scope.nodes=false", "scope.pools=false")
    assert of_kind(documents, "ClusterRole") == []
    assert of_kind(documents, "ClusterRoleBinding") == []
    assert environment_of(documents)["SHOAL_NODE_SIGNALS"] == "false"


def test_kueue_needs_a_value(tools: Path) -> None:
    scope = ("scope.namespace=team-a", "scope.nodes=false", "scope.pools=false")
    without, documents = render(tools, *scope), render(tools, *scope, "kueue.enabled=true")
    assert not {resource for resource, _ in granted(without, "Role")} & {"workloads", "workloads/status"}
    assert granted(documents, "Role") - granted(without, "Role") == {
        *(("workloads", verb) for verb in ("get", "list", "watch", "create", "delete")),
        ("workloads/status", "patch"),
    }
    assert granted(documents, "ClusterRole") == {
        ("resourceflavors", "list"),
        ("resourceflavors", "watch"),
        ("workloadpriorityclasses", "get"),
        ("priorityclasses", "get"),
        ("priorityclasses", "list"),
    }
    assert environment_of(documents)["SHOAL_KUEUE"] == "true"


def test_users_with_the_builtin_roles_may_use_jobs(tools: Path) -> None:
    roles = {r["metadata"]["name"]: r for r in of_kind(render(tools, crds=True), "ClusterRole")}
    edit, view = roles["shoal-trainingjobs-edit"], roles["shoal-trainingjobs-view"]
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert ("trainingjobs/scale", "patch") in granted([edit], "ClusterRole")
    assert {verb for _, verb in granted([view], "ClusterRole")} == {"get", "list", "watch"}


def test_rights_that_the_builtin_roles_are_not_to_have_are_taken_from_them(tools: Path) -> None:
    """Helm leaves what is to be kept as it was where it is rendered no more: roles say that they are not added."""
    with_them, without = (
        {r["metadata"]["name"]: r for r in of_kind(render(tools, *sets, crds=True), "ClusterRole")}
        for sets in ((), ("rbac.aggregateRoles=false",))
    )
    assert with_them.keys() == without.keys()

    def added(roles: dict[str, dict[str, Any]]) -> list[tuple[str, str]]:
        prefix = "rbac.authorization.k8s.io/aggregate-to-"
        told = [
            (name.removeprefix(prefix), value)
            for role in roles.values()
            for name, value in role["metadata"]["labels"].items()
            if name.startswith(prefix)
        ]
        return sorted(told)

    assert added(with_them) == [("admin", "true"), ("edit", "true"), ("view", "true")]
    assert added(without) == [("admin", "false"), ("edit", "false"), ("view", "false")]


def test_rights_of_users_stay_with_the_crds(tools: Path) -> None:
    """An uninstall keeps the CRDs, and another release may work with them."""
    roles = [
        each
        for each in of_kind(render(tools, crds=True), "ClusterRole")
        if each["metadata"]["name"].startswith(("shoal-trainingjobs-", "shoal-capacitypools-"))
    ]
    assert len(roles) == 3
    for each in roles:
        assert each["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "shoal-capacitypools-view" in {each["metadata"]["name"] for each in roles}


def test_existing_service_account_is_not_created(tools: Path) -> None:
    documents = render(tools, "serviceAccount.create=false", "serviceAccount.name=mine")
    assert of_kind(documents, "ServiceAccount") == []
    assert pod_of(documents)["serviceAccountName"] == "mine"
    subjects = [b["subjects"] for b in of_kind(documents, "ClusterRoleBinding")]
    assert all(subject["name"] == "mine" for [subject] in subjects)


def test_who_makes_roles_elsewhere_gets_none(tools: Path) -> None:
    documents = render(tools, "rbac.create=false", crds=True)
    assert [each["kind"] for each in documents if "Role" in each["kind"]] == []


def test_pools_that_the_operator_may_not_read_are_not_asked_for(tools: Path) -> None:
    assert environment_of(render(tools))["SHOAL_POOLS"] == "true"
    assert environment_of(render(tools, "scope.pools=false"))["SHOAL_POOLS"] == "false"
