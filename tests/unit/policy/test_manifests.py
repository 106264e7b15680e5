"""Manifests of pods, Services, the Secret and the disruption budget."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Literal

import pytest

from shoal import manifests
from shoal.api.capacity_pool import CapacityPool
from shoal.api.kube import Pod
from shoal.api.labels import Place
from shoal.manifests import names
from shoal.manifests.merge import merge
from shoal.manifests.placement import Where
from shoal.manifests.pods import GRACE_SECONDS, PodFactory, worker_requests
from shoal.sizing.fleet.jobs import fleet_job
from shoal.sizing.fleet.problems import batch_of
from shoal.sizing.fleet.resources import fleet_pool
from shoal_trainer.contract import (
    ACCELERATORS_ENV,
    CODE_DIR,
    SECRET_DIR,
    AcceleratorBatch,
    RuntimeConfig,
    Shard,
    StopAfter,
)
from shoal_trainer.worker.hardware import fitted
from tests.unit.policy import build


def worker(**spec: Any) -> dict[str, Any]:
    return manifests.pod(build.job(**spec), Place("worker", 2, 5), build.IMAGES)


def server(**spec: Any) -> dict[str, Any]:
    return manifests.pod(build.job(**spec), Place("ps", 0, 1), build.IMAGES)


def container(pod: dict[str, Any], name: str) -> dict[str, Any]:
    return next(c for c in pod["spec"]["containers"] if c["name"] == name)


def config(pod: dict[str, Any], name: str) -> RuntimeConfig:
    """The configuration as the kubelet passes it to the process."""
    value = next(e["value"] for e in container(pod, name)["env"] if e["name"] == "SHOAL_CONFIG")
    expanded = (
        value.replace("$(SHOAL_POD_IP)", "10.0.0.7")
        .replace("$(SHOAL_NODE_NAME)", "spot-1")
        .replace("$$", "$")
    )
    return RuntimeConfig.model_validate_json(expanded)


def test_names_and_labels() -> None:
    pod = worker()
    assert pod["metadata"]["name"] == "digits-worker-2-5"
    assert pod["metadata"]["labels"]["shoal.dev/incarnation"] == "5"
    assert pod["metadata"]["ownerReferences"][0]["uid"] == build.UID
    assert names.place_of_name("a-b-ps-3-worker-2-5") == Place("worker", 2, 5)
    assert all(len(value) <= 63 for value in pod["metadata"]["labels"].values())


@pytest.mark.parametrize("pod", [worker(), server()])
def test_restricted_pod_security(pod: dict[str, Any]) -> None:
    security = pod["spec"]["securityContext"]
    assert security["runAsNonRoot"]
    assert security["runAsUser"] == 65532
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["spec"]["automountServiceAccountToken"] is False
    for each in pod["spec"]["containers"]:
        assert each["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


def test_workers_require_spot_nodes_and_servers_exclude_them() -> None:
    def terms(pod: dict[str, Any]) -> list[dict[str, Any]]:
        required = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        return required["nodeSelectorTerms"]  # type: ignore[no-any-return]

    assert {e["operator"] for t in terms(worker()) for e in t["matchExpressions"]} == {"In"}
    assert len(terms(worker())) > 3
    assert len(terms(server())) == 1
    assert {e["operator"] for e in terms(server())[0]["matchExpressions"]} == {"NotIn"}


def test_restart_policies_and_grace_periods() -> None:
    assert worker()["spec"]["restartPolicy"] == "Never"
    assert worker()["spec"]["terminationGracePeriodSeconds"] == 20
    assert server()["spec"]["restartPolicy"] == "OnFailure"
    assert server()["spec"]["terminationGracePeriodSeconds"] == 60
    assert server()["metadata"]["annotations"]["karpenter.sh/do-not-disrupt"] == "true"


def test_a_server_knows_the_grace_period_of_its_pod() -> None:
    longer = server(parameterServers={"template": {"spec": {"terminationGracePeriodSeconds": 300}}})
    assert longer["spec"]["terminationGracePeriodSeconds"] == 300
    assert config(longer, "ps").grace_seconds == 300
    assert config(server(), "ps").grace_seconds == 60
    assert config(worker(), "worker").grace_seconds == 20


def test_a_server_binds_its_port_before_it_is_probed() -> None:
    """A probe that fails is a Warning in the job's events, at each start."""
    assert server()["spec"]["containers"][0]["readinessProbe"]["initialDelaySeconds"] >= 2


def test_runtime_config_of_a_worker() -> None:
    training = {
        "entrypoint": "digits:job",
        "args": {"path": "$(HOME)/$x", "depth": 20},
        "batchSize": 16,
        "batchSizes": [{"accelerator": "T4", "batchSize": 8}],
        "stopAfter": {"metric": "dice", "value": "0.97", "mode": "Max"},
        "initialFrom": {"uri": "s3://b/other", "weightsOnly": True},
        "staleness": {"max": 8, "policy": "Inverse"},
    }
    received = config(worker(training=training, parameterServers={"replicas": 2}), "worker")
    assert received.job.prefix == f"team/digits/{build.UID}"
    assert (received.role, received.index, received.incarnation) == ("worker", 2, 5)
    assert received.parameter_servers == (
        Shard(host="digits-ps-0.team.svc"),
        Shard(host="digits-ps-1.team.svc"),
    )
    assert received.args == {"path": "$(HOME)/$x", "depth": 20}
    assert (received.batch_size, received.batch_sizes) == (
        16,
        (AcceleratorBatch(accelerator="T4", batch_size=8),),
    )
    assert received.stop_after == StopAfter(metric="dice", value=0.97, mode="Max")
    assert received.initial_from is not None
    assert received.initial_from.weights_only
    assert (received.staleness.max, received.staleness.policy) == (8, "Inverse")
    assert (received.bind_host, received.node_name) == ("10.0.0.7", "spot-1")


@pytest.mark.parametrize("data_tls", [False, True])
def test_data_tls_reaches_both_roles(data_tls: bool) -> None:
    spec = build.job_manifest()["spec"]["training"] | {"dataTls": data_tls}
    assert config(worker(training=spec), "worker").data_tls is data_tls
    assert config(server(training=spec), "ps").data_tls is data_tls


def test_data_tls_and_staleness_limit_are_off_by_default() -> None:
    received = config(worker(), "worker")
    assert (received.data_tls, received.staleness.max) == (False, None)


def test_staleness_of_zero_reaches_the_worker() -> None:
    spec = build.job_manifest()["spec"]["training"] | {"staleness": {"max": 0}}
    assert config(worker(training=spec), "worker").staleness.max == 0


@pytest.mark.parametrize(
    ("storage", "uri", "volume"),
    [
        ({"uri": "s3://bucket/runs"}, "s3://bucket/runs", None),
        (
            {"volumeClaim": {"name": "runs"}},
            "file:///var/run/shoal/storage",
            {"persistentVolumeClaim": {"claimName": "runs"}},
        ),
        ({"ephemeral": {}}, "file:///var/run/shoal/storage", {"emptyDir": {}}),
    ],
)
def test_storage_is_mounted_only_by_servers(
    storage: dict[str, Any], uri: str, volume: dict[str, Any] | None
) -> None:
    pod = server(storage=storage)
    assert config(pod, "ps").storage_uri == uri
    found = [v for v in pod["spec"]["volumes"] if v["name"] == "shoal-storage"]
    assert found == ([{"name": "shoal-storage", **volume}] if volume else [])
    assert "shoal-storage" not in {v["name"] for v in worker(storage=storage)["spec"]["volumes"]}


def test_template_is_merged_over_the_defaults() -> None:
    template = {
        "metadata": {"labels": {"team": "vision"}, "annotations": {"note": "x"}},
        "spec": {
            "containers": [
                {
                    "name": "worker",
                    "image": "me/digits:1",
                    "env": [{"name": "HOME", "value": "/data"}, {"name": "SHOAL_CONFIG", "value": "mine"}],
                    "resources": {"requests": {"memory": "8Gi"}, "limits": {"nvidia.com/gpu": 1}},
                    "volumeMounts": [{"name": "data", "mountPath": "/data"}],
                },
                {"name": "logs", "image": "me/logs"},
            ],
            "volumes": [{"name": "data", "emptyDir": {}}],
            "tolerations": [{"key": "mine", "operator": "Exists"}],
            "terminationGracePeriodSeconds": 25,
            "affinity": None,
        },
    }
    pod = worker(workers={"replicas": 3, "template": template})
    trains = container(pod, "worker")
    assert trains["image"] == "me/digits:1"
    assert trains["command"] == ["shoal-trainer", "work"]
    assert trains["resources"]["requests"] == {"cpu": "500m", "memory": "8Gi"}
    assert {"name": "HOME", "value": "/data"} in trains["env"]
    assert {"name": "SHOAL_ACCELERATORS", "value": "1"} in trains["env"]
    assert config(pod, "worker").entrypoint == "digits:job"
    assert {m["mountPath"] for m in trains["volumeMounts"]} == {"/tmp", "/var/run/shoal/secret", "/data"}
    assert container(pod, "logs")["image"] == "me/logs"
    assert pod["metadata"]["labels"]["team"] == "vision"
    assert pod["spec"]["terminationGracePeriodSeconds"] == 25
    assert "affinity" not in pod["spec"]
    assert {t["key"] for t in pod["spec"]["tolerations"]} >= {"mine", "nvidia.com/gpu"}


@pytest.mark.parametrize("make", [worker, server])
@pytest.mark.parametrize(
    "field", ["terminationGracePeriodSeconds", "containers", "volumes", "securityContext"]
)
def test_a_null_in_a_template_makes_a_pod_all_the_same(make: Callable[..., Any], field: str) -> None:
    """Of `terminationGracePeriodSeconds: null` the job was an internal error for ever."""
    role = "worker" if make is worker else "ps"
    part = "workers" if make is worker else "parameterServers"
    pod = make(**{part: {"replicas": 1, "template": {"spec": {field: None}}}})
    assert container(pod, role)["command"][0] == "shoal-trainer"
    expected = 30 if field == "terminationGracePeriodSeconds" else GRACE_SECONDS[role]
    assert pod["spec"]["terminationGracePeriodSeconds"] == expected


def test_preferred_affinity_of_the_template_is_added_to_ours() -> None:
    apart = {
        "weight": 10,
        "podAffinityTerm": {"topologyKey": "topology.kubernetes.io/zone", "labelSelector": {}},
    }
    affinity = {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}}
    pod = worker(workers={"replicas": 3, "template": {"spec": {"affinity": affinity}}})
    preferred = pod["spec"]["affinity"]["podAntiAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
    assert [each["weight"] for each in preferred] == [100, 10]
    assert preferred[1] == apart
    assert "nodeAffinity" in pod["spec"]["affinity"]


def test_jobs_of_the_same_name_share_no_secret_or_selector() -> None:
    one = build.job()
    other = one.model_copy(update={"metadata": one.metadata.model_copy(update={"uid": "ffffffff-0000"})})
    assert names.secret_name(one) != names.secret_name(other)
    assert names.service_selector(one, 0, 0) != names.service_selector(other, 0, 0)


@pytest.mark.parametrize("pod", [worker(), server()], ids=["worker", "server"])
def test_pods_get_the_key_only_as_a_mounted_file(pod: dict[str, Any]) -> None:
    assert "secretKeyRef" not in json.dumps(pod)
    assert all("envFrom" not in part and "args" not in part for part in pod["spec"]["containers"])
    (volume,) = [volume for volume in pod["spec"]["volumes"] if "secret" in volume]
    mounts = [
        m for part in pod["spec"]["containers"] for m in part["volumeMounts"] if m["name"] == volume["name"]
    ]
    assert [(m["mountPath"], m["readOnly"]) for m in mounts] == [(SECRET_DIR, True)]


def test_secret_encodes_its_data() -> None:
    made = manifests.secret(build.job(), {"key": b"\x00\x01"})
    assert made["data"] == {"key": "AAE="}
    assert made["immutable"]


def test_disruption_budget_can_be_met() -> None:
    """Monitoring reports one that asks for more pods than there are."""
    budgets = [manifests.disruption_budget(build.job(parameterServers={"replicas": n})) for n in (1, 4)]
    assert [budget["spec"]["minAvailable"] for budget in budgets] == [1, 4]


def test_limit_below_a_default_request_replaces_it() -> None:
    limits = {"cpu": "200m", "nvidia.com/gpu": 1}
    template = {"spec": {"containers": [{"name": "worker", "resources": {"limits": limits}}]}}
    made = manifests.pod(
        build.job(workers={"replicas": 1, "template": template}), Place("worker", 0, 0), build.IMAGES
    )
    assert made["spec"]["containers"][0]["resources"] == {"requests": {"memory": "1Gi"}, "limits": limits}


def test_manifests_are_json() -> None:
    a_job = build.job(storage={"volumeClaim": {"name": "runs"}})
    for made in (worker(), server(), manifests.service(a_job, 0, 0), manifests.disruption_budget(a_job)):
        assert json.loads(json.dumps(made)) == made


@pytest.mark.parametrize("role", ["worker", "ps"])
@pytest.mark.parametrize(
    "terms", [[{}], [{"matchExpressions": None}], [{"matchExpressions": [{"operator": "Exists"}]}]]
)
def test_terms_that_the_api_server_refuses_are_sent_for_it_to_say_so(
    role: Literal["worker", "ps"], terms: list[Any]
) -> None:
    """And are no error of the operator's own."""
    needs = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    template = {"spec": {"affinity": {"nodeAffinity": needs}}}
    field = "workers" if role == "worker" else "parameterServers"
    a_job = build.job(**{field: {"replicas": 1, "template": template}})
    pod = manifests.pod(a_job, Place(role, 0, 0), build.IMAGES)
    assert pod["spec"]["affinity"]["nodeAffinity"]


@pytest.mark.parametrize(
    ("defaults", "patch", "merged"),
    [
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": {"b": 1, "c": 2}}, {"a": {"b": 3}}, {"a": {"b": 3, "c": 2}}),
        ({"a": 1}, {"a": None}, {}),
        ({"args": ["x"]}, {"args": ["y"]}, {"args": ["y"]}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "value": "2"}, {"name": "B"}]},
         {"env": [{"name": "A", "value": "2"}, {"name": "B"}]}),
        ({"tolerations": [{"key": "a"}]}, {"tolerations": [{"key": "b"}]},
         {"tolerations": [{"key": "a"}, {"key": "b"}]}),
        ({"volumes": [{"name": "a"}]}, {"volumes": [{"name": {"b": 1}}]}, {"volumes": [{"name": {"b": 1}}]}),
        ({"volumes": [{"name": "a", "emptyDir": {}}]}, {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]},
         {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}),
        ({"volumes": [{"name": "a", "secret": {"secretName": "b", "defaultMode": 256}}]},
         {"volumes": [{"name": "a", "secret": {"secretName": "c"}}]},
         {"volumes": [{"name": "a", "secret": {"secretName": "c", "defaultMode": 256}}]}),
        ({"volumes": [{"name": "a", "emptyDir": {}}]}, {"volumes": [{"name": "a"}]},
         {"volumes": [{"name": "a", "emptyDir": {}}]}),
        ({"volumes": [{"name": "a", "emptyDir": {}}]},
         {"volumes": [{"name": "a", "emptyDir": None, "hostPath": {"path": "/"}}]},
         {"volumes": [{"name": "a", "hostPath": {"path": "/"}}]}),
        ({"env": [{"name": "A", "value": "1"}]}, {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]},
         {"env": [{"name": "A", "valueFrom": {"fieldRef": {}}}]}),
        ({"env": [{"name": "B"}]},
         {"env": [{"name": "A", "value": "1"}, {"name": "A", "valueFrom": {"fieldRef": {}}}]},
         {"env": [{"name": "B"}, {"name": "A", "valueFrom": {"fieldRef": {}}}]}),
        ({"ports": [{"containerPort": 53, "name": "a"}]},
         {"ports": [{"containerPort": 53, "protocol": "UDP"}, {"containerPort": 53, "protocol": "TCP"}]},
         {"ports": [{"containerPort": 53, "name": "a", "protocol": "TCP"},
                    {"containerPort": 53, "protocol": "UDP"}]}),
        ({"readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 1}},
         {"readinessProbe": {"exec": {"command": ["x"]}, "failureThreshold": 3}},
         {"readinessProbe": {"exec": {"command": ["x"]}, "failureThreshold": 3, "periodSeconds": 1}}),
        ({"readinessProbe": {"tcpSocket": {"port": 1}}}, {"readinessProbe": {"periodSeconds": 9}},
         {"readinessProbe": {"tcpSocket": {"port": 1}, "periodSeconds": 9}}),
        ({"a": {"nodeSelectorTerms": [{"matchExpressions": [1]}]}}, {"a": {"nodeSelectorTerms": [{}]}},
         {"a": {"nodeSelectorTerms": [{}]}}),
    ],
)  # fmt: skip
def test_merge(defaults: dict[str, Any], patch: dict[str, Any], merged: dict[str, Any]) -> None:
    assert merge(defaults, patch) == merged


@pytest.mark.parametrize(
    ("accelerator", "limits", "expected"),
    [
        ({"name": "L4", "count": 8}, {}, {"nvidia.com/gpu": 8}),
        ({"name": "L4"}, {"memory": "8Gi"}, {"nvidia.com/gpu": 1, "memory": "8Gi"}),
        ({"name": "L4", "count": 8}, {"nvidia.com/gpu": 2}, {"nvidia.com/gpu": 2}),
        ({"name": "A100"}, {"nvidia.com/mig-1g.5gb": 1}, {"nvidia.com/mig-1g.5gb": 1}),
        (None, {"memory": "8Gi"}, {"memory": "8Gi"}),
    ],
)
def test_a_worker_requests_the_gpus_of_its_pools_nodes(
    accelerator: dict[str, Any] | None, limits: dict[str, Any], expected: dict[str, Any]
) -> None:
    """With pools of one and of eight GPUs a node, no template fits both."""
    pool = CapacityPool.model_validate(
        {"metadata": {"name": "p"}, "spec": {"accelerator": accelerator, "limits": {"nodes": 1}}}
    )
    template = {"spec": {"containers": [{"name": "worker", "resources": {"limits": limits}}]}}
    a_job, where = build.job(workers={"replicas": 1, "template": template}), Where("Spot", pool)
    made = manifests.pod(a_job, Place("worker", 0, 0), build.IMAGES, where)
    assert container(made, "worker")["resources"]["limits"] == expected
    of_gpus = any(name.startswith("nvidia.com/") for name in expected)
    assert container(made, "worker")["image"] == (build.IMAGES.worker_gpu if of_gpus else build.IMAGES.worker)
    tolerated = "nvidia.com/gpu" in [each["key"] for each in made["spec"]["tolerations"]]
    assert tolerated == ("nvidia.com/gpu" in expected)
    told = [each["value"] for each in container(made, "worker")["env"] if each["name"] == ACCELERATORS_ENV]
    assert told == ([str(expected["nvidia.com/gpu"])] if tolerated else [])
    server = manifests.pod(a_job, Place("ps", 0, 0), build.IMAGES, where)
    assert "limits" not in container(server, "ps")["resources"]


@pytest.mark.parametrize("limits", [{}, {"cpu": "2"}])
@pytest.mark.parametrize("requests", [{}, {"cpu": "1500m"}, {"memory": "4Gi"}])
@pytest.mark.parametrize(
    "side", [{}, {"requests": {"cpu": "100m", "memory": "64Mi"}, "limits": {"cpu": "1"}}]
)
def test_what_a_pool_takes_a_worker_to_ask_for_is_what_its_pod_asks_for(
    limits: dict[str, str], requests: dict[str, str], side: dict[str, Any]
) -> None:
    """A container beside it that asks for memory had the worker counted without any."""
    its = {"name": "worker", "resources": {"limits": limits, "requests": requests}}
    template = {"spec": {"containers": [its, {"name": "side", "resources": side}]}}
    pool = CapacityPool.model_validate({"metadata": {"name": "p"}, "spec": {"limits": {"nodes": 1}}})
    a_job = build.job(workers={"replicas": 1, "template": template})
    made = manifests.pod(a_job, Place("worker", 0, 0), build.IMAGES, Where("Any", pool))
    assert (
        worker_requests(a_job, pool) == Pod.model_validate(made | {"metadata": {"name": "x"}}).spec.requests
    )


def test_code_in_the_storage_is_told_and_not_mounted() -> None:
    code = {"digest": "0" * 64}
    training = {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}, "code": code}
    pod = worker(training=training, storage={"uri": "s3://b/runs"})
    assert "shoal-code" not in [each["name"] for each in pod["spec"]["volumes"]]
    assert config(pod, "worker").code_digest == "0" * 64


def test_code_of_a_config_map_is_mounted_in_workers_only() -> None:
    training = {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}, "code": {"configMap": "digits-code"}}
    pod = worker(training=training)
    assert {"name": "shoal-code", "configMap": {"name": "digits-code"}} in pod["spec"]["volumes"]
    mounted = {mount["name"]: mount for mount in container(pod, "worker")["volumeMounts"]}
    assert mounted["shoal-code"] == {"name": "shoal-code", "mountPath": CODE_DIR, "readOnly": True}
    assert "shoal-code" not in json.dumps(server(training=training))
    assert "shoal-code" not in json.dumps(worker())


def test_a_worker_is_told_the_cores_of_its_pools_nodes() -> None:
    def told(cores: int | str | None) -> float:
        spec = {"cores": cores, "limits": {"nodes": 1}, "nodeSelector": {"example.com/pool": "slow"}}
        pool = CapacityPool.model_validate({"metadata": {"name": "slow"}, "spec": spec})
        where = Where(capacity="Any", pool=pool)
        made = manifests.pod(build.job(), Place("worker", 0, 0), build.IMAGES, where)
        return config(made, "worker").cores

    assert [told(cores) for cores in ("0.15", 4, None)] == [0.15, 4.0, 0.0]
    assert config(worker(), "worker").cores == 0.0


@pytest.mark.parametrize(("batch", "steps", "reference"), [(None, 64, 128), (256, 256, 128)])
def test_a_worker_has_the_batch_of_its_pool_as_planned_and_weighs_its_pushes_by_that_of_its_job(
    batch: int | None, steps: int, reference: int
) -> None:
    """The planner went by what no worker was told: 16 of them for 10."""
    spec = {"accelerator": {"name": "T4"}, "limits": {"nodes": 4}, "price": {"perHour": 1}}
    pool = CapacityPool.model_validate({"metadata": {"name": "big"}, "spec": spec | {"batchSize": batch}})
    training = {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}, "batchSize": 128}
    a_job = build.job(training=training | {"batchSizes": [{"accelerator": "T4", "batchSize": 64}]})
    pods = PodFactory(a_job, build.IMAGES)

    def told(place: Place, pool: CapacityPool | None) -> RuntimeConfig:
        return fitted(config(pods.pod(place, Where("Any", pool)), place.role), "Tesla T4")

    for number in range(2):
        found = told(Place("worker", number, 0), pool)
        assert (found.batch_size, found.reference_batch_size) == (steps, reference)
    assert batch_of(fleet_job(a_job, None, build.NOW), fleet_pool(pool)) == steps
    assert told(Place("worker", 2, 0), None).batch_size == 64, "beside a pool, as the job says"
    server = config(pods.pod(Place("ps", 0, 0), Where("Any", pool)), "ps")
    assert (server.batch_size, server.reference_batch_size) == (128, None)
