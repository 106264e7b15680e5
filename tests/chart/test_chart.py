"""The chart as rendered by `helm`: objects, permissions, and rejected values."""

import json
import re
import shlex
import subprocess
from collections.abc import Hashable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dev.images import IMAGES
from dev.paths import ROOT
from dev.publish import install_command
from shoal.api.labels import SPOT_LABELS
from shoal.cluster.lease import LeaseTimes
from shoal.manifests.installed import labels_of
from shoal.process.pools import PoolSettings
from tests.unit.docs.pages import read, section
from tests.unit.policy.test_placement import AUTOPILOT_KEYS

CHART = Path(__file__).parents[2] / "charts" / "shoal"


def helm(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(tools / "helm"), *arguments], capture_output=True, text=True, check=False)


IMAGES_SET = (
    "image.repository=r.io/operator",
    "trainer.psImage=r.io/ps:1",
    "trainer.workerImage=r.io/worker:1",
)


def render(
    tools: Path, *sets: str, namespace: str = "shoal-system", crds: bool = False
) -> list[dict[str, Any]]:
    """The objects of a release. Its CRDs only where they are asked for: they take three times as long as the rest."""
    values = (*IMAGES_SET, *sets) if crds else (*IMAGES_SET, *sets, "crds.install=false")
    return parsed(rendered(tools, namespace, values))


@cache
def rendered(tools: Path, namespace: str, values: tuple[str, ...]) -> str:
    """What helm says; many tests look at the same release."""
    flags = [flag for value in values for flag in ("--set", value)]
    done = helm(tools, "template", "shoal", str(CHART), "--namespace", namespace, *flags)
    assert done.returncode == 0, done.stderr
    return done.stdout


class NoKeyTwice(yaml.CSafeLoader):
    """As kustomize, with which Flux post-renders: of a key that is there twice it takes neither."""


def _mapping(loader: NoKeyTwice, node: yaml.MappingNode) -> dict[Hashable, Any]:
    keys = [key.value for key, _ in node.value]
    assert len(keys) == len(set(keys)), f"a key is there twice: {sorted(keys)}"
    return loader.construct_mapping(node, deep=True)


NoKeyTwice.add_constructor("tag:yaml.org,2002:map", _mapping)


def parsed(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all(text, NoKeyTwice) if document]


def of_kind(documents: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [d for d in documents if d["kind"] == kind]


def environment_of(documents: list[dict[str, Any]]) -> dict[str, str]:
    """The variables of the operator's container."""
    (operator, *_) = of_kind(documents, "Deployment")
    env = operator["spec"]["template"]["spec"]["containers"][0]["env"]
    return {each["name"]: each.get("value", "") for each in env}


def granted(documents: list[dict[str, Any]], kind: str) -> set[tuple[str, str]]:
    return {
        (resource, verb)
        for role in of_kind(documents, kind)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_lint(tools: Path) -> None:
    done = helm(tools, "lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def documented_installs() -> Iterator[list[str]]:
    """The `helm install` of docs/kind.md, and the one that `make images` prints."""
    page = (ROOT / "docs" / "kind.md").read_text(encoding="utf-8")
    commands = [*page.splitlines(), install_command("registry.example.com/team", "1").replace("\\\n", "")]
    yield from (shlex.split(line) for line in commands if line.startswith("helm install"))


@pytest.mark.by_day(1)
@pytest.mark.parametrize("words", list(documented_installs()), ids=["kind", "make images"])
def test_documented_install_renders(tools: Path, words: list[str]) -> None:
    done = subprocess.run(
        [str(tools / "helm"), "template", *words[2:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    [deployment] = of_kind(parsed(done.stdout), "Deployment")
    image = deployment["spec"]["template"]["spec"]["containers"][0]["image"]
    assert image in {IMAGES["operator"].reference, "registry.example.com/team/shoal-operator:1"}


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_images_that_a_machine_built_run_on_nodes_of_its_architecture(
    tools: Path, machine: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    words = shlex.split(install_command("r.io/t", "1").replace("\\\n", ""))
    done = subprocess.run(
        [str(tools / "helm"), "template", *words[2:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    documents = parsed(done.stdout)
    [deployment] = of_kind(documents, "Deployment")
    assert deployment["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": architecture}
    assert labels_of(environment_of(documents), "SHOAL_NODE_SELECTOR") == {"kubernetes.io/arch": architecture}


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


def test_two_renderings_are_the_same(tools: Path) -> None:
    switches = ("serviceMonitor", "podMonitor", "rules", "dashboard")
    everything = ["page.enabled=true", "networkPolicy.enabled=true", "admissionPolicy.enabled=true"]
    everything += [f"metrics.{each}.enabled=true" for each in switches]
    once = render(tools, *everything)
    rendered.cache_clear()
    assert render(tools, *everything) == once
    assert of_kind(render(tools), "Secret") == []


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("image.repository", "make images REGISTRY="),
        ("trainer.psImage", "parameter servers"),
        ("trainer.workerImage", "workers"),
    ],
)
def test_an_image_that_is_not_named_says_how_to_get_one(tools: Path, missing: str, words: str) -> None:
    sets = [each for each in IMAGES_SET if not each.startswith(missing)]
    done = helm(tools, "template", "shoal", str(CHART), *(flag for each in sets for flag in ("--set", each)))
    assert done.returncode != 0
    assert f"{missing} is not set" in done.stderr
    assert words in done.stderr


def test_workers_with_gpus_have_an_image_of_their_own_if_one_is_named(tools: Path) -> None:
    for image in ("", "r.io/worker-gpu:1"):
        environment = environment_of(render(tools, f"trainer.workerGpuImage={image}"))
        assert environment.get("SHOAL_IMAGE_WORKER_GPU", "") == image


def test_values_that_neighbours_have(tools: Path) -> None:
    digest = "sha256:" + "a" * 64
    documents = render(
        tools, "nameOverride=other", f"image.digest={digest}", "probes.liveness.periodSeconds=33",
        "podDisruptionBudget.enabled=false",
        "topologySpreadConstraints[0].maxSkew=1", "topologySpreadConstraints[0].topologyKey=zone",
        "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule", "rbac.aggregateRoles=false",
    )  # fmt: skip
    [deployment] = of_kind(documents, "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    [container] = spec["containers"]
    assert deployment["metadata"]["name"] == "other"
    assert container["image"] == f"r.io/operator@{digest}"
    assert container["livenessProbe"]["periodSeconds"] == 33
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    [spread] = spec["topologySpreadConstraints"]
    assert spread["labelSelector"]["matchLabels"] == deployment["spec"]["selector"]["matchLabels"]
    assert of_kind(documents, "PodDisruptionBudget") == []
    assert not [
        d for d in of_kind(documents, "ClusterRole") if d["metadata"]["name"].startswith("shoal-trainingjobs")
    ]
    assert not [
        d
        for d in render(tools, "rbac.create=false", "crds.install=false")
        if "Role" in d["kind"] and "shoal-t" not in d["metadata"]["name"]
    ]


def test_page_is_off_by_default(tools: Path) -> None:
    def ports(*sets: str) -> set[str]:
        documents = render(tools, *sets)
        [deployment], [service] = of_kind(documents, "Deployment"), of_kind(documents, "Service")
        container = deployment["spec"]["template"]["spec"]["containers"][0]
        names = {each["name"] for each in container["ports"]}
        assert ("SHOAL_PAGE_PORT" in {each["name"] for each in container["env"]}) == ("page" in names)
        assert ("page" in names) == ("page" in {each["name"] for each in service["spec"]["ports"]})
        return names

    assert ports() == {"metrics", "health"}
    assert ports("page.enabled=true") == {"metrics", "health", "page"}


def test_network_policy_admits_every_port_of_the_operator(tools: Path) -> None:
    documents = render(tools, "networkPolicy.enabled=true", "page.enabled=true")
    [deployment], [policy] = of_kind(documents, "Deployment"), of_kind(documents, "NetworkPolicy")
    assert all("from" not in rule for rule in policy["spec"]["ingress"])
    admitted = {each["port"] for rule in policy["spec"]["ingress"] for each in rule["ports"]}
    assert admitted == {
        each["name"] for each in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]
    }
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
        assert (
            "schema" in helm(tools, "template", "shoal", str(CHART), "--set", f"networkPolicy.{wrong}").stderr
        )


def test_replicas_keep_apart_and_off_spot_nodes(tools: Path) -> None:
    documents = render(tools, "pools.enabled=true", "pools.replicas=2", "spotLabels.node-lifecycle=spot")
    for deployment in of_kind(documents, "Deployment"):
        affinity = deployment["spec"]["template"]["spec"]["affinity"]
        [apart] = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        selected = apart["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert selected == deployment["spec"]["selector"]["matchLabels"]
        [safe] = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        named = {each["key"]: tuple(each["values"]) for each in safe["preference"]["matchExpressions"]}
        assert named == {**SPOT_LABELS, "node-lifecycle": ("spot",)}
        assert {each["operator"] for each in safe["preference"]["matchExpressions"]} == {"NotIn"}
    own = "affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms[0].x=y"
    [deployment] = of_kind(render(tools, own), "Deployment")
    assert list(deployment["spec"]["template"]["spec"]["affinity"]) == ["nodeAffinity"]


def test_a_process_that_stands_still_is_ended_when_it_has_left_the_lease(tools: Path) -> None:
    """And not before: two rules of what is too long would be one too many."""
    for deployment in of_kind(render(tools, "pools.enabled=true"), "Deployment"):
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        probe = container["livenessProbe"]
        assert probe["periodSeconds"] * probe["failureThreshold"] == LeaseTimes().stalled


def test_a_replica_that_is_not_ready_keeps_no_node_from_being_drained(tools: Path) -> None:
    [budget] = of_kind(render(tools), "PodDisruptionBudget")
    assert budget["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_spot_nodes_of_ones_own_are_named_by_values(tools: Path) -> None:
    assert not any("SPOT" in name for name in environment_of(render(tools)))
    role = "node-role.kubernetes.io/spot-worker"
    sets = (
        "spotLabels.node-lifecycle=spot",
        f"spotLabels.{role.replace('.', chr(92) + '.')}=",
        "spotTaints.example\\.com/reclaimable=",
    )
    documents = render(tools, *sets)
    environment = environment_of(documents)
    assert labels_of(environment, "SHOAL_SPOT_LABELS") == {"node-lifecycle": "spot", role: ""}
    assert labels_of(environment, "SHOAL_SPOT_TAINTS") == {"example.com/reclaimable": ""}
    for wrong in ("spotLabels.node-lifecycle=a b", "spotTaints.a b=c"):
        assert "schema" in helm(tools, "template", "shoal", str(CHART), "--set", wrong).stderr


def test_units_of_buffers_go_where_pods_of_jobs_go(tools: Path) -> None:
    documents = render(tools, "pools.enabled=true", "platform=eks", "spotTaints.example\\.com/spot=yes")
    [deployment] = [d for d in of_kind(documents, "Deployment") if d["metadata"]["name"] == "shoal-pools"]
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    settings = PoolSettings.from_environment(
        {each["name"]: each.get("value", "") for each in container["env"]}
    )
    assert settings.node_selector == {"kubernetes.io/arch": "amd64"}
    assert (settings.platform.name, settings.platform.taints) == ("eks", {"example.com/spot": "yes"})


def test_pods_run_where_the_images_do(tools: Path) -> None:
    """Cloud clusters mix architectures, and an image is of one."""

    def said(*sets: str) -> tuple[dict[str, str], dict[str, str]]:
        documents = render(tools, *sets)
        [deployment] = of_kind(documents, "Deployment")
        selector = deployment["spec"]["template"]["spec"].get("nodeSelector", {})
        return selector, labels_of(environment_of(documents), "SHOAL_NODE_SELECTOR")

    amd64 = {"kubernetes.io/arch": "amd64"}
    assert said() == (amd64, amd64)
    arch = "trainer.nodeSelector.kubernetes\\.io/arch"
    assert said(f"{arch}=arm64", "nodeSelector.pool=system") == (
        {**amd64, "pool": "system"},
        {"kubernetes.io/arch": "arm64"},
    )
    assert said(f"{arch}=null") == (amd64, {})


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
    deployments = of_kind(render(tools, *sets), "Deployment")
    [pod] = [d["spec"]["template"]["spec"] for d in deployments if d["metadata"]["name"].endswith("-pools")]
    assert {"name": "key", "secret": {"secretName": "key"}} in pod["volumes"]
    assert {"name": "key", "mountPath": "/key"} in pod["containers"][0]["volumeMounts"]


def test_monitors_find_the_operator_and_the_coordinators(tools: Path) -> None:
    documents = render(tools, "metrics.podMonitor.enabled=true", "scope.namespace=team-a")
    [monitor] = of_kind(documents, "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert monitor["spec"]["selector"]["matchLabels"] == {"shoal.dev/role": "ps", "shoal.dev/index": "0"}
    [everywhere] = of_kind(render(tools, "metrics.podMonitor.enabled=true"), "PodMonitor")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}


def test_rbac_rules_have_no_wildcard(tools: Path) -> None:
    rules = [r for role in of_kind(render(tools), "ClusterRole") for r in role["rules"]]
    assert rules
    assert not [r for r in rules if "*" in r["verbs"] + r["resources"] + r["apiGroups"]]


def test_gitops_installs_the_operator_with_values_that_the_chart_takes(tools: Path, tmp_path: Path) -> None:
    page = section(read("docs/gitops.md"), "The operator itself")
    kinds = []
    for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL):
        object_ = yaml.safe_load(block)
        kinds.append(object_["kind"])
        spec = object_["spec"]
        values = spec["values"] if "values" in spec else spec["source"]["helm"]["valuesObject"]
        chart = spec["chart"]["spec"]["chart"] if "values" in spec else spec["source"]["path"]
        file = tmp_path / "values.yaml"
        file.write_text(yaml.safe_dump(values))
        done = helm(tools, "template", "shoal", str(ROOT / chart), "--values", str(file))
        assert done.returncode == 0, done.stderr
        assert f"{values['image']['repository']}:{values['image']['tag']}" in done.stdout
    assert kinds == ["Application", "HelmRelease"]


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

        documents = render(tools, "crds.install=false", *values)
        assert asked(documents) == asked(render(tools, "crds.install=false", "rbac.create=false", *values))
        roles = [d for d in documents if d["kind"] in {"Role", "ClusterRole"}]
        given = [(role["metadata"].get("namespace", ""), role["rules"]) for role in roles]
        assert sorted(asked(documents), key=str) == sorted(given, key=str)


def test_single_namespace_needs_a_role_and_access_to_nodes_and_pools(tools: Path) -> None:
    documents = render(tools, "scope.namespace=team-a", "crds.install=false")
    pools = {
        ("capacitypools", "list"),
        ("capacitypools", "watch"),
        ("capacitypools/status", "update"),
        ("priorityclasses", "list"),
    }
    assert granted(documents, "ClusterRole") == {
        ("nodes", "get"),
        ("nodes", "list"),
        ("nodes", "watch"),
        *pools,
    }
    assert ("pods", "create") in granted(documents, "Role")
    role = next(r for r in of_kind(documents, "Role") if r["metadata"]["name"] == "shoal")
    assert role["metadata"]["namespace"] == "team-a"


def test_without_access_to_nodes_and_pools_nothing_is_cluster_wide(tools: Path) -> None:
    documents = render(
        tools, "scope.namespace=team-a", "scope.nodes=false", "scope.pools=false", "crds.install=false"
    )
    assert of_kind(documents, "ClusterRole") == []
    assert of_kind(documents, "ClusterRoleBinding") == []
    environment = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "SHOAL_NODE_SIGNALS", "value": "false"} in environment


def test_kueue_needs_a_value(tools: Path) -> None:
    scope = ("scope.namespace=team-a", "scope.nodes=false", "scope.pools=false", "crds.install=false")
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
    environment = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "SHOAL_KUEUE", "value": "true"} in environment


def test_users_with_the_builtin_roles_may_use_jobs(tools: Path) -> None:
    roles = {r["metadata"]["name"]: r for r in of_kind(render(tools, crds=True), "ClusterRole")}
    edit, view = roles["shoal-trainingjobs-edit"], roles["shoal-trainingjobs-view"]
    assert edit["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-edit"] == "true"
    assert view["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"] == "true"
    assert ("trainingjobs/scale", "patch") in granted([edit], "ClusterRole")
    assert {verb for _, verb in granted([view], "ClusterRole")} == {"get", "list", "watch"}


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


def test_own_labels_come_before_those_that_all_have(tools: Path) -> None:
    """And no key is there twice, which `parsed` sees."""
    parts = ("serviceMonitor", "podMonitor", "rules", "dashboard")
    sets = [f"metrics.{part}.{what}" for part in parts for what in ("enabled=true", "labels.team=b")]
    documents = render(tools, "commonLabels.team=a", "podLabels.team=b", "pools.enabled=true", *sets)
    teams = {
        (each["kind"], labels.get("team"))
        for each in documents
        for labels in (
            each["metadata"]["labels"],
            *([each["spec"]["template"]["metadata"]["labels"]] if each["kind"] == "Deployment" else ()),
        )
    }
    assert teams >= {("Deployment", "a"), ("Deployment", "b"), ("Service", "a")}
    assert {team for kind, team in teams if kind in {"ServiceMonitor", "PodMonitor", "PrometheusRule"}} == {
        "b"
    }


def test_on_autopilot_the_charts_own_pods_carry_only_its_keys(tools: Path) -> None:
    documents = render(tools, "platform=autopilot", "pools.enabled=true", "spotLabels.mine=yes")
    keys = {
        expression["key"]
        for each in of_kind(documents, "Deployment")
        for term in each["spec"]["template"]["spec"]["affinity"]["nodeAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        for expression in term["preference"]["matchExpressions"]
    }
    assert keys
    assert keys <= AUTOPILOT_KEYS


def test_existing_service_account_is_not_created(tools: Path) -> None:
    documents = render(tools, "serviceAccount.create=false", "serviceAccount.name=mine")
    assert of_kind(documents, "ServiceAccount") == []
    assert of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["serviceAccountName"] == "mine"
    subjects = [b["subjects"] for b in of_kind(documents, "ClusterRoleBinding")]
    assert all(subject["name"] == "mine" for [subject] in subjects)


def test_service_monitor_has_the_labels_that_prometheus_selects(tools: Path) -> None:
    documents = render(
        tools, "metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.labels.release=prom"
    )
    [monitor] = of_kind(documents, "ServiceMonitor")
    assert monitor["metadata"]["labels"]["release"] == "prom"


def test_node_pools_are_scraped_as_the_operator_is_and_not_for_it(tools: Path) -> None:
    """Nobody found out that they were gone."""
    documents = render(tools, "metrics.serviceMonitor.enabled=true", "pools.enabled=true")
    services = {each["metadata"]["name"]: each for each in of_kind(documents, "Service")}
    for each in of_kind(documents, "ServiceMonitor"):
        wanted = each["spec"]["selector"]["matchLabels"]
        [service] = [s for s in services.values() if wanted.items() <= s["metadata"]["labels"].items()]
        [deployment] = [
            d["spec"]["template"]["metadata"]["labels"]
            for d in of_kind(documents, "Deployment")
            if d["metadata"]["name"] == each["metadata"]["name"]
        ]
        assert service["spec"]["selector"].items() <= deployment.items()
        assert each["spec"]["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]
    assert services.keys() == {"shoal-metrics", "shoal-pools-metrics"}


def test_operator_meets_the_restricted_standard(tools: Path) -> None:
    (deployment,) = of_kind(render(tools), "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert deployment["spec"]["replicas"] == 2
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "health"}
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "health"}


def test_existing_install_key_replaces_the_generated_one(tools: Path) -> None:
    documents = render(tools, "installKey.existingSecret=mine")
    assert of_kind(documents, "Secret") == []
    volumes = of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]["volumes"]
    assert volumes[0]["secret"]["secretName"] == "mine"
    assert "initContainers" not in of_kind(documents, "Deployment")[0]["spec"]["template"]["spec"]


def test_install_key_is_made_by_the_operator_into_memory(tools: Path) -> None:
    spec = of_kind(render(tools), "Deployment")[0]["spec"]["template"]["spec"]
    [made] = spec["initContainers"]
    assert made["command"][:4] == ["shoal-operator", "install-key", "--secret", "shoal-install-key"]
    assert made["securityContext"] == spec["containers"][0]["securityContext"]
    volume = next(each for each in spec["volumes"] if each["name"] == "install-key")
    assert volume["emptyDir"]["medium"] == "Memory"
    [mounted] = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "install-key"]
    assert mounted["readOnly"] is True
    assert made["command"][-1].startswith(mounted["mountPath"])


@pytest.mark.by_day(7)
@pytest.mark.parametrize(
    "setting",
    [
        "replica=3",
        "replicas=0",
        "image.repo=x",
        "image.repository=a: b",
        "logLevel=loud",
        "scope.namespace=Team_A",
        "metrics.port=80",
        "metrics.port=null",
        "image=null",
        "image.repository=registry/shoal:1.0",
        "trainer=null",
        "serviceAccount=null",
        "serviceAccount.name=Foo bar",
        "serviceAccount.create=false",
        "podLabels.app\\.kubernetes\\.io/name=x",
        "extraEnv[0].name=POD_NAME",
        "extraEnv[0].name=SHOAL_LOG_LEVEL",
        "pools.extraEnv[0].name=SHOAL_METRICS_PORT",
        "pools.enable=true",
        "pools.targets[0].resource=MachineDeployment",
        "pools.serviceAccount.create=false",
        "podDisruptionBudget.maxUnavailable=0",
        "podDisruptionBudget.maxUnavailable=0%",
        "podDisruptionBudget.maxUnavailable=some",
    ],
)
def test_invalid_value_is_rejected(tools: Path, setting: str) -> None:
    done = helm(tools, "template", "shoal", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert "don't meet the specifications of the schema" in done.stderr
    assert re.split(r"[=.\[]", setting)[0] in done.stderr


@pytest.mark.parametrize("most", ["1", "2", "50%", "100%"])
def test_a_replica_may_be_evicted(tools: Path, most: str) -> None:
    """Where none may, no node that has one can be drained: 0 is refused (above)."""
    [budget] = of_kind(render(tools, f"podDisruptionBudget.maxUnavailable={most}"), "PodDisruptionBudget")
    assert str(budget["spec"]["maxUnavailable"]) == most


def test_variables_of_the_chart_are_set_once(tools: Path) -> None:
    """The schema keeps them out of extraEnv: a variable that is there twice breaks a later server-side apply."""
    everything = (
        *("kueue.enabled=true", "page.enabled=true", "pools.enabled=true", "trainer.workerGpuImage=r.io/g:1"),
        *("spotLabels.a=b", "spotTaints.a=b", "scope.namespace=a", "page.hosts={a}"),
    )
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    documents = render(tools, *everything)
    for deployment, properties in (("shoal", schema), ("shoal-pools", schema["pools"]["properties"])):
        [found] = [d for d in of_kind(documents, "Deployment") if d["metadata"]["name"] == deployment]
        [container] = found["spec"]["template"]["spec"]["containers"]
        refused = properties["extraEnv"]["items"]["properties"]["name"]["not"]["enum"]
        assert refused == sorted(each["name"] for each in container["env"])


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            "admissionPolicy.namespaceLabels.jobs=yes",
            "admissionPolicy.namespaceLabels hold nobody without admissionPolicy.enabled",
        ),
        ("pools.bufferNamespaces[0]=buffers", "pools.bufferNamespaces and pools.targets are for shoal-pools"),
        (
            "pools.targets[0].apiGroup=a,pools.targets[0].resource=b,pools.targets[0].names[0]=c",
            "pools.bufferNamespaces and pools.targets are for shoal-pools",
        ),
    ],
)
def test_a_value_that_would_do_nothing_is_refused(tools: Path, setting: str, words: str) -> None:
    assert words in refusal(tools, setting)


def test_who_makes_roles_elsewhere_gets_none(tools: Path) -> None:
    documents = render(tools, "rbac.create=false", crds=True)
    assert [each["kind"] for each in documents if "Role" in each["kind"]] == []


def refusal(tools: Path, *words: str) -> str:
    """What `helm template` says instead of rendering; `words`: values, or options."""
    sets = [
        part for word in (*IMAGES_SET, *words) for part in ([word] if word[0] == "-" else ["--set", word])
    ]
    done = helm(tools, "template", "shoal", str(CHART), "--namespace", "team-a", *sets)
    assert done.returncode != 0
    return done.stderr


def test_each_port_is_used_once(tools: Path) -> None:
    for values in (
        ["metrics.port=8081"],
        ["page.enabled=true", "page.port=8080"],
        ["metrics.port=8082", "page.enabled=true"],
    ):
        assert "metrics.port and page.port must differ from each other and from 8081" in refusal(
            tools, *values
        )
    assert render(tools, "metrics.port=8082")
    [deployment] = of_kind(render(tools), "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
    assert {"name": "health", "containerPort": 8081} in container["ports"]


def test_pools_are_not_sized_where_the_operator_does_not_read_them(tools: Path) -> None:
    assert "pools.enabled needs scope.pools" in refusal(tools, "pools.enabled=true", "scope.pools=false")
    assert "pools.enabled needs scope.nodes" in refusal(tools, "pools.enabled=true", "scope.nodes=false")


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "setting", ["networkPolicy.egress.enabled=true", "networkPolicy.jobNamespaces={team}"]
)
def test_network_policies_are_not_asked_for_in_vain(tools: Path, setting: str) -> None:
    """Nobody would notice that nothing is held."""
    assert "make no policy without networkPolicy.enabled: set it" in refusal(tools, setting)
    assert of_kind(render(tools, "networkPolicy.enabled=true", setting), "NetworkPolicy")
    assert of_kind(render(tools, "networkPolicy.enabled=true", "networkPolicy.egress=null"), "NetworkPolicy")
    assert of_kind(
        render(tools, "networkPolicy.enabled=true", "networkPolicy.jobEgress=null"), "NetworkPolicy"
    )
    unnamed = ("networkPolicy.enabled=true", "networkPolicy.jobEgress.enabled=true")
    assert "makes no policy without networkPolicy.jobNamespaces: name them" in refusal(tools, *unnamed)


def test_admission_policy_needs_kubernetes_1_30(tools: Path) -> None:
    assert "needs Kubernetes 1.30" in refusal(tools, "admissionPolicy.enabled=true", "--kube-version=1.29.9")


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


def names_of(documents: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]) for d in documents}


def test_releases_in_two_namespaces_share_no_object(tools: Path) -> None:
    settings = ["scope.namespace=team-{}"]
    one, two = (
        names_of(render(tools, *(s.format(team) for s in settings), namespace=f"shoal-{team}"))
        for team in "ab"
    )
    assert not one & two
    assert {kind for kind, namespace, _ in one if not namespace} == {"ClusterRole", "ClusterRoleBinding"}


@pytest.mark.by_day(3)
@pytest.mark.parametrize("release", ["123", "true", "1e3", "7-a", "shoal.v2"])
@pytest.mark.parametrize("scope", ["", "77"])
def test_names_that_look_like_other_yaml_types_stay_strings(tools: Path, release: str, scope: str) -> None:
    def strings(part: Any) -> Iterator[Any]:
        if isinstance(part, dict):
            for name, each in part.items():
                if name in {"name", "namespace", "secretName", "serviceAccountName", "resourceNames"}:
                    yield from each if isinstance(each, list) else [each]
                yield from each.values() if name in {"labels", "matchLabels", "selector"} else ()
                yield from strings(each)
        elif isinstance(part, list):
            for each in part:
                yield from strings(each)

    done = helm(tools, "template", release, str(CHART), "-n", "456", "--set-string", f"scope.namespace={scope}",
                "--set", "crds.install=false,metrics.serviceMonitor.enabled=true",
                *(flag for each in IMAGES_SET for flag in ("--set", each)))  # fmt: skip
    assert done.returncode == 0, done.stderr
    documents = parsed(done.stdout)
    assert [each for each in strings(documents) if not isinstance(each, str | dict)] == []
    assert all(re.fullmatch("[a-z][-a-z0-9]*", d["metadata"]["name"]) for d in of_kind(documents, "Service"))


def pools_only(tools: Path, *sets: str) -> list[dict[str, Any]]:
    """The objects that `pools.enabled` adds."""
    without = names_of(render(tools))
    return [d for d in render(tools, "pools.enabled=true", *sets) if not names_of([d]) & without]


def test_node_pools_are_left_alone_by_default(tools: Path) -> None:
    assert not [name for _, _, name in names_of(render(tools)) if name.endswith("-pools")]


def test_node_pools_are_sized_by_a_process_that_may_touch_no_pod(tools: Path) -> None:
    added = pools_only(tools)
    [deployment] = of_kind(added, "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    assert pod["containers"][0]["command"] == ["shoal-pools"]
    assert pod["serviceAccountName"] == "shoal-pools"
    assert pod["securityContext"]["runAsNonRoot"] is True
    rights = granted(added, "ClusterRole") | granted(added, "Role")
    assert rights == {
        ("capacitypools", "list"),
        ("capacitypools", "watch"),
        ("capacitypools", "patch"),
        ("capacitypools/status", "patch"),
        ("leases", "create"),
        ("leases", "get"),
        ("leases", "watch"),
        ("leases", "update"),
        ("leases", "patch"),
        ("events", "create"),
        ("events", "patch"),
    }
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        assert {b["subjects"][0]["name"] for b in of_kind(added, kind)} == {"shoal-pools"}
    operator = next(d for d in of_kind(render(tools), "Deployment") if d["metadata"]["name"] == "shoal")
    selectors = [d["spec"]["selector"]["matchLabels"] for d in (operator, deployment)]
    assert selectors[0] != selectors[1]


def test_node_pools_are_sized_by_the_pinned_image_too(tools: Path) -> None:
    digest = "sha256:" + "a" * 64
    [deployment] = of_kind(pools_only(tools, f"image.digest={digest}"), "Deployment")
    [container] = deployment["spec"]["template"]["spec"]["containers"]
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
        [deployment] = [d for d in of_kind(documents, "Deployment") if d["metadata"]["name"] == "shoal-pools"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        named = {each["name"]: each.get("value", "") for each in container["env"]}
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


def test_the_full_name_is_that_of_all_objects(tools: Path) -> None:
    """As other charts call it; it has no release before it."""
    named = names_of(render(tools, "fullnameOverride=fish", "nameOverride=other"))
    assert named == names_of(render(tools, "nameOverride=fish"))


def test_helm_test_runs_the_operators_check_with_its_own_account(tools: Path) -> None:
    documents = render(tools, "scope.namespace=team", "metrics.port=9999", "nameOverride=fish")
    [pod] = of_kind(documents, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    [deployment] = of_kind(documents, "Deployment")
    operator = deployment["spec"]["template"]["spec"]
    assert pod["spec"]["serviceAccountName"] == operator["serviceAccountName"]
    assert pod["spec"]["securityContext"] == operator["securityContext"]
    [container], [own] = pod["spec"]["containers"], operator["containers"]
    assert (container["image"], container["securityContext"]) == (own["image"], own["securityContext"])
    assert container["command"][:2] == ["shoal-operator", "check"]
    [service] = of_kind(documents, "Service")
    settings = dict(word.removeprefix("--").split("=", 1) for word in container["command"][2:])
    environment = {each["name"]: each.get("value") for each in own["env"]}
    assert "trainingjobs" in settings.pop("roles")
    assert settings == {
        "namespace": environment["SHOAL_NAMESPACE"],
        "lease": environment["SHOAL_LEASE_NAME"],
        "metrics": f"http://{service['metadata']['name']}.shoal-system:9999/metrics",
    }
    selector = service["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "it would be taken for an operator"


def test_every_object_has_the_common_labels(tools: Path) -> None:
    documents = render(
        tools, "commonLabels.team=ml", "pools.enabled=true", "page.enabled=true", "networkPolicy.enabled=true",
        "admissionPolicy.enabled=true", "metrics.serviceMonitor.enabled=true", "metrics.podMonitor.enabled=true",
        "metrics.rules.enabled=true", "metrics.dashboard.enabled=true", crds=True,
    )  # fmt: skip
    bare = {d["kind"] for d in documents if d["metadata"].get("labels", {}).get("team") != "ml"}
    assert bare <= {"CustomResourceDefinition"}
    for deployment in of_kind(documents, "Deployment"):
        assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "ml"
        assert "team" not in deployment["spec"]["selector"]["matchLabels"], "selectors are immutable"


def test_more_volumes_and_how_monitors_scrape(tools: Path) -> None:
    documents = render(
        tools, "metrics.serviceMonitor.enabled=true", "metrics.serviceMonitor.scrapeTimeout=7s",
        "metrics.podMonitor.enabled=true", "metrics.podMonitor.relabelings[0].targetLabel=cluster",
        "metrics.podMonitor.metricRelabelings[0].action=drop",
        "extraVolumes[0].name=ca", "extraVolumes[0].configMap.name=ca",
        "extraVolumeMounts[0].name=ca", "extraVolumeMounts[0].mountPath=/ca",
    )  # fmt: skip
    [service], [pods] = of_kind(documents, "ServiceMonitor"), of_kind(documents, "PodMonitor")
    assert service["spec"]["endpoints"] == [{"port": "metrics", "interval": "30s", "scrapeTimeout": "7s"}]
    assert pods["spec"]["podMetricsEndpoints"] == [
        {
            "port": "metrics",
            "interval": "30s",
            "relabelings": [{"targetLabel": "cluster"}],
            "metricRelabelings": [{"action": "drop"}],
        }
    ]
    [deployment] = of_kind(documents, "Deployment")
    spec = deployment["spec"]["template"]["spec"]
    assert spec["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    assert spec["containers"][0]["volumeMounts"][-1] == {"name": "ca", "mountPath": "/ca"}


LABEL = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
"""What Kubernetes takes as the value of a label."""
EVERYTHING = (
    *(
        "pools.enabled=true",
        "page.enabled=true",
        "networkPolicy.enabled=true",
        "admissionPolicy.enabled=true",
    ),
    *(f"metrics.{each}.enabled=true" for each in ("serviceMonitor", "podMonitor", "rules", "dashboard")),
)


def labels_in(part: Any) -> Iterator[tuple[str, str]]:
    """Each label of an object, of its pods, and of what selects them."""
    if isinstance(part, dict):
        for name, each in part.items():
            yield from each.items() if name in {"labels", "matchLabels"} and each else ()
            yield from labels_in(each)
    elif isinstance(part, list):
        for each in part:
            yield from labels_in(each)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(
    "version", ["0.1.0+1a2b3c4d5e6f", "0.1.0-rc.1+a.b", "0.1.0+" + "a" * 62, "0.1.0-" + "a" * 48 + ".-.-"]
)
def test_a_chart_of_any_version_has_labels_that_kubernetes_takes(
    tools: Path, tmp_path: Path, version: str
) -> None:
    """Flux with `reconcileStrategy: Revision` adds +COMMIT to it, and the API server refused every object."""
    packed = helm(tools, "package", str(CHART), "--version", version, "--destination", str(tmp_path))
    assert packed.returncode == 0, packed.stderr
    [archive] = tmp_path.glob("*.tgz")
    flags = [flag for value in (*IMAGES_SET, *EVERYTHING) for flag in ("--set", value)]
    done = helm(tools, "template", "shoal", str(archive), *flags)
    assert done.returncode == 0, done.stderr
    documents = parsed(done.stdout)
    labels = [label for document in documents for label in labels_in(document.get("metadata", {}))]
    assert any(name == "helm.sh/chart" for name, _ in labels)
    assert [(name, value) for name, value in labels if not LABEL.fullmatch(value)] == []
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(documents, "Deployment")]
    assert not any("helm.sh/chart" in each for each in pods), "every commit would restart the replicas"


def test_pools_that_the_operator_may_not_read_are_not_asked_for(tools: Path) -> None:
    assert environment_of(render(tools))["SHOAL_POOLS"] == "true"
    assert environment_of(render(tools, "scope.pools=false"))["SHOAL_POOLS"] == "false"


def test_a_chart_of_charts_may_leave_it_out(tools: Path, tmp_path: Path) -> None:
    """`condition: shoal.enabled` of a dependency, where the parent's values say so; they may be `global`, too."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "shoal").symlink_to(CHART)
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [
        {"name": "shoal", "version": "*", "condition": "shoal.enabled"}]}  # fmt: skip
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    images = [flag for each in IMAGES_SET for flag in ("--set", f"shoal.{each}")]
    for enabled in (True, False):
        flags = ("--set", f"shoal.enabled={str(enabled).lower()},global.team=a")
        done = helm(tools, "template", "p", str(tmp_path), *images, *flags)
        assert done.returncode == 0, done.stderr
        assert bool(of_kind(parsed(done.stdout), "Deployment")) == enabled
    assert "schema" in refusal(tools, "enabled=perhaps")


def test_a_scope_that_is_null_is_that_of_all_namespaces(tools: Path) -> None:
    every = ("admissionPolicy.enabled=true", "networkPolicy.enabled=true", "metrics.podMonitor.enabled=true")
    assert render(tools, "scope.namespace=null", *every) == render(tools, *every)
    assert "SHOAL_NAMESPACE" not in environment_of(render(tools)), (
        "the API server drops a value that is empty"
    )
    assert environment_of(render(tools, "scope.namespace=a"))["SHOAL_NAMESPACE"] == "a"


RELEASES = st.from_regex(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", fullmatch=True)


@settings(max_examples=5, deadline=None)
@given(RELEASES.filter(lambda name: len(name) <= 53))
@example("a" * 53)
@example("1" * 44 + "----" + "b" * 5)
@example("a" * 48 + "--b")
def test_every_release_has_names_that_kubernetes_takes(tools: Path, release: str) -> None:
    """A Service's name has at most 63 characters, and Helm's name of a release 53."""
    flags = [flag for each in (*IMAGES_SET, *EVERYTHING, "crds.install=false") for flag in ("--set", each)]
    done = helm(tools, "template", release, str(CHART), *flags)
    assert done.returncode == 0, done.stderr
    documents = parsed(done.stdout)
    services = [each["metadata"]["name"] for each in of_kind(documents, "Service")]
    assert len(set(services)) == 2
    assert [name for name in services if not re.fullmatch("[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name)] == []
    names = [each["metadata"]["name"] for each in documents if "Role" not in each["kind"]]
    part = "[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    assert [name for name in names if not re.fullmatch(rf"{part}(\.{part})*", name)] == []
    labels = [label for document in documents for label in labels_in(document)]
    assert [(name, value) for name, value in labels if not LABEL.fullmatch(value)] == []


def test_names_of_releases_that_were_short_enough_stay(tools: Path) -> None:
    documents = render(tools, f"fullnameOverride={'a' * 40}", "pools.enabled=true")
    assert {each["metadata"]["name"] for each in of_kind(documents, "Service")} == {
        "a" * 40 + "-metrics",
        "a" * 40 + "-pools-metrics",
    }
