"""The operator's own Deployment: where it runs, as whom, with which images, probes and volumes, and who scrapes it."""

import shlex
from pathlib import Path

import pytest

from dev.publish import install_command
from shoal.cluster.lease import LeaseTimes
from shoal.manifests.installed import labels_of, own_spot_of
from shoal.manifests.platforms import KARPENTER, PLATFORMS, platform_of
from tests.chart.rendered import (
    CHART,
    IMAGES_SET,
    container_of,
    environment_of,
    flags,
    helm,
    of_kind,
    pod_of,
    ports_of,
    refusal,
    render,
    template,
)


@pytest.mark.by_day(1)
@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", "amd64"), ("aarch64", "arm64")])
def test_images_that_a_machine_built_run_on_nodes_of_its_architecture(
    tools: Path, machine: str, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("platform.machine", lambda: machine)
    words = shlex.split(install_command("r.io/t", "1").replace("\\\n", ""))
    documents = template(tools, *words[2:])
    selector = {"kubernetes.io/arch": architecture, "kubernetes.io/os": "linux"}
    assert pod_of(documents)["nodeSelector"] == selector
    assert labels_of(environment_of(documents), "SHOAL_NODE_SELECTOR") == selector


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
    done = helm(tools, "template", "shoal", str(CHART), *flags(*sets))
    assert done.returncode != 0
    assert f"{missing} is not set" in done.stderr
    assert words in done.stderr


def test_workers_with_gpus_have_an_image_of_their_own_if_one_is_named(tools: Path) -> None:
    for image in ("", "r.io/worker-gpu:1"):
        environment = environment_of(render(tools, f"trainer.workerGpuImage={image}"))
        assert environment.get("SHOAL_IMAGE_WORKER_GPU", "") == image


def test_page_is_off_by_default(tools: Path) -> None:
    def ports(*sets: str) -> set[str]:
        documents = render(tools, *sets)
        [service], names = of_kind(documents, "Service"), ports_of(documents)
        assert ("SHOAL_PAGE_PORT" in environment_of(documents)) == ("page" in names)
        assert ("page" in names) == ("page" in {each["name"] for each in service["spec"]["ports"]})
        return names

    assert ports() == {"metrics", "health"}
    assert ports("page.enabled=true") == {"metrics", "health", "page"}


@pytest.mark.parametrize("platform", ["auto", *PLATFORMS])
def test_replicas_keep_apart_and_off_the_nodes_that_servers_of_jobs_avoid(tools: Path, platform: str) -> None:
    """Where nobody says that there are EKS' node groups, their key is left out: the Karpenter of EKS Auto Mode makes
    no node for a pod that names it, and the operator would never start."""
    own = () if platform == "autopilot" else ("spotLabels.node-lifecycle=spot",)
    documents = render(tools, "pools.enabled=true", f"platform={platform}", *own)
    said = PLATFORMS.get(platform, KARPENTER)
    (avoided,) = platform_of([], said, own_spot_of(environment_of(documents, "shoal"))).on_demand_terms()
    for deployment in of_kind(documents, "Deployment"):
        affinity = pod_of([deployment])["affinity"]
        [apart] = affinity["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        selected = apart["podAffinityTerm"]["labelSelector"]["matchLabels"]
        assert selected == deployment["spec"]["selector"]["matchLabels"]
        [safe] = affinity["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        found, expected = (
            sorted(term["matchExpressions"], key=str) for term in (safe["preference"], avoided)
        )
        assert found == expected


def test_where_and_how_pods_run_is_said_once_for_both_processes(tools: Path) -> None:
    """A way out of what the chart does by default, which shoal-pools had not."""
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    documents = render(
        tools, "pools.enabled=true", "probes.liveness.periodSeconds=33", "affinity.nodeAffinity.x=y",
        *(f"topologySpreadConstraints[0].{key}={value}" for key, value in spread.items()),
    )  # fmt: skip
    for deployment in of_kind(documents, "Deployment"):
        pod, selector = pod_of([deployment]), deployment["spec"]["selector"]
        assert pod["affinity"] == {"nodeAffinity": {"x": "y"}}
        assert pod["topologySpreadConstraints"] == [{**spread, "labelSelector": selector}]
        assert container_of([deployment])["livenessProbe"]["periodSeconds"] == 33


def test_a_spread_over_pods_of_ones_own_choice_is_over_all_of_them(tools: Path) -> None:
    """The chart's own labels were added to it."""
    spread = "topologySpreadConstraints[0]"
    sets = [f"{spread}.maxSkew=1", f"{spread}.topologyKey=zone", f"{spread}.whenUnsatisfiable=DoNotSchedule"]
    documents = render(tools, *sets, f"{spread}.labelSelector.matchLabels.tier=control")
    [found] = pod_of(documents)["topologySpreadConstraints"]
    assert found["labelSelector"] == {"matchLabels": {"tier": "control"}}


def test_no_node_is_kept_for_the_files_of_a_pod(tools: Path) -> None:
    """By default cluster-autoscaler never removes a node of a pod with a volume on it, unless that is named."""
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict-local-volumes"
    for each in of_kind(render(tools, "pools.enabled=true", "podAnnotations.a=b"), "Deployment"):
        on_disk = [
            volume["name"]
            for volume in pod_of([each])["volumes"]
            if volume.get("emptyDir", {"medium": "Memory"}).get("medium") != "Memory"
        ]
        assert on_disk
        annotations = each["spec"]["template"]["metadata"]["annotations"]
        assert annotations == {key: ",".join(on_disk), "a": "b"}
    mine = "podAnnotations." + key.replace(".", "\\.")
    [deployment] = of_kind(render(tools, f"{mine}=scratch"), "Deployment")
    assert deployment["spec"]["template"]["metadata"]["annotations"] == {key: "scratch"}


def test_a_process_that_stands_still_is_ended_when_it_has_left_the_lease(tools: Path) -> None:
    """And not before: two rules of what is too long would be one too many."""
    for each in of_kind(render(tools, "pools.enabled=true"), "Deployment"):
        probe = container_of([each])["livenessProbe"]
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
        assert "schema" in refusal(tools, wrong)


def test_pods_run_where_the_images_do(tools: Path) -> None:
    """Cloud clusters mix architectures and operating systems, and an image is of one."""

    def said(*sets: str) -> tuple[dict[str, str], dict[str, str]]:
        documents = render(tools, *sets)
        selector = pod_of(documents).get("nodeSelector", {})
        return selector, labels_of(environment_of(documents), "SHOAL_NODE_SELECTOR")

    linux = {"kubernetes.io/os": "linux"}
    amd64 = {"kubernetes.io/arch": "amd64", **linux}
    assert said() == (amd64, amd64)
    arch = "trainer.nodeSelector.kubernetes\\.io/arch"
    assert said(f"{arch}=arm64", "nodeSelector.pool=system") == (
        {**amd64, "pool": "system"},
        {"kubernetes.io/arch": "arm64", **linux},
    )
    assert said(f"{arch}=null") == (amd64, linux)


def test_monitors_find_the_operator_and_the_coordinators(tools: Path) -> None:
    documents = render(tools, "metrics.podMonitor.enabled=true", "scope.namespace=team-a")
    [monitor] = of_kind(documents, "PodMonitor")
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["team-a"]}
    assert monitor["spec"]["selector"]["matchLabels"] == {"shoal.dev/role": "ps", "shoal.dev/index": "0"}
    [everywhere] = of_kind(render(tools, "metrics.podMonitor.enabled=true"), "PodMonitor")
    assert everywhere["spec"]["namespaceSelector"] == {"any": True}


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
    [deployment] = of_kind(render(tools), "Deployment")
    pod, container = pod_of([deployment]), container_of([deployment])
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
    pod = pod_of(documents)
    assert {"name": "install-key", "secret": {"secretName": "mine"}} in pod["volumes"]
    assert "initContainers" not in pod


def test_install_key_is_made_by_the_operator_into_memory(tools: Path) -> None:
    spec = pod_of(render(tools))
    [made] = spec["initContainers"]
    assert made["command"][:4] == ["shoal-operator", "install-key", "--secret", "shoal-install-key"]
    assert made["securityContext"] == spec["containers"][0]["securityContext"]
    volume = next(each for each in spec["volumes"] if each["name"] == "install-key")
    assert volume["emptyDir"]["medium"] == "Memory"
    [mounted] = [each for each in spec["containers"][0]["volumeMounts"] if each["name"] == "install-key"]
    assert mounted["readOnly"] is True
    assert made["command"][-1].startswith(mounted["mountPath"])


@pytest.mark.parametrize("most", ["1", "2", "50%", "100%"])
def test_a_replica_may_be_evicted(tools: Path, most: str) -> None:
    """Where none may, no node that has one can be drained: 0 is refused."""
    [budget] = of_kind(render(tools, f"podDisruptionBudget.maxUnavailable={most}"), "PodDisruptionBudget")
    assert str(budget["spec"]["maxUnavailable"]) == most


def test_helm_test_runs_the_operators_check_with_its_own_account(tools: Path) -> None:
    documents = render(tools, "scope.namespace=team", "metrics.port=9999", "nameOverride=fish")
    [pod] = of_kind(documents, "Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    operator = pod_of(documents)
    assert pod["spec"]["serviceAccountName"] == operator["serviceAccountName"]
    assert pod["spec"]["securityContext"] == operator["securityContext"]
    [container], [own] = pod["spec"]["containers"], operator["containers"]
    assert (container["image"], container["securityContext"]) == (own["image"], own["securityContext"])
    assert container["command"][:2] == ["shoal-operator", "check"]
    [service] = of_kind(documents, "Service")
    settings = dict(word.removeprefix("--").split("=", 1) for word in container["command"][2:])
    environment = environment_of(documents)
    assert "trainingjobs" in settings.pop("roles")
    assert settings == {
        "namespace": environment["SHOAL_NAMESPACE"],
        "lease": environment["SHOAL_LEASE_NAME"],
        "metrics": f"http://{service['metadata']['name']}.shoal-system:9999/metrics",
    }
    selector = service["spec"]["selector"]
    assert not selector.items() <= pod["metadata"]["labels"].items(), "it would be taken for an operator"


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
    [scraped] = pods["spec"]["podMetricsEndpoints"]
    assert scraped["relabelings"] == [{"targetLabel": "cluster"}]
    assert [each["action"] for each in scraped["metricRelabelings"]] == ["keep", "drop"]
    spec = pod_of(documents)
    assert spec["volumes"][-1] == {"name": "ca", "configMap": {"name": "ca"}}
    assert spec["containers"][0]["volumeMounts"][-1] == {"name": "ca", "mountPath": "/ca"}


def test_what_pods_need_to_run_and_to_reach_the_api_server_the_test_and_the_key_have_too(tools: Path) -> None:
    """Behind a proxy the operator stayed in Init:Error, and beside a sidecar `helm test` never ended."""
    documents = render(
        tools, "extraEnv[0].name=KUBERNETES_SERVICE_HOST", "extraEnv[0].value=api.internal", "podLabels.inject=no",
        "podAnnotations.mesh=none", "priorityClassName=system", "commonLabels.team=a",
    )  # fmt: skip
    [pod], operator = of_kind(documents, "Pod"), pod_of(documents)
    host = {"name": "KUBERNETES_SERVICE_HOST", "value": "api.internal"}
    for each in (*pod["spec"]["containers"], *operator["initContainers"], *operator["containers"]):
        assert host in each["env"], each["name"]
    labels, annotations = pod["metadata"]["labels"], pod["metadata"]["annotations"]
    assert (labels["inject"], labels["team"], pod["spec"]["priorityClassName"]) == ("no", "a", "system")
    assert (annotations["mesh"], annotations["helm.sh/hook"]) == ("none", "test")


@pytest.mark.parametrize("handler", ["tcpSocket.port=8081", "grpc.port=8081", "exec.command[0]=true"])
def test_a_probe_has_one_way_to_ask(tools: Path, handler: str) -> None:
    """The API server refuses two."""
    container = container_of(render(tools, f"probes.liveness.{handler}"))
    name = handler.partition(".")[0]
    assert {"httpGet", name} & container["livenessProbe"].keys() == {name}
    assert container["livenessProbe"]["periodSeconds"] == 10
    assert "httpGet" in container["startupProbe"]
