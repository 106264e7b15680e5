"""The CRD on a real API server: `kubectl apply` rejects a bad manifest and says what to change."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.cluster import ControlPlane
from dev.kube import ApiError, Kube
from shoal.api.capacity_pool import CapacityPool
from shoal.api.training_job import TrainingJob

pytestmark = [pytest.mark.control_plane, pytest.mark.usefixtures("crds")]

GOOD: dict[str, Any] = {
    "apiVersion": "shoal.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "good"},
    "spec": {
        "storage": {"uri": "s3://bucket/runs"},
        "training": {
            "entrypoint": "digits:job",
            "args": {"rate": 0.1, "layers": [64, 32], "augment": True},
            "stopAfter": {"epochs": 3},
        },
        "workers": {"replicas": 2},
    },
}


def kubectl(plane: ControlPlane, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["kubectl", *arguments], env=plane.env, input=stdin, capture_output=True, text=True, check=False
    )


def eventually(call: Callable[[], str], seconds: float = 80.0) -> str:
    """The first non-empty output: the OpenAPI document follows a new CRD after a moment."""
    deadline = time.monotonic() + seconds
    while not (output := call()) and time.monotonic() < deadline:
        pass
    return output


def with_(**at: Any) -> dict[str, Any]:
    """The valid manifest with changes at paths, `__` between the steps; None removes a field."""
    manifest = copy.deepcopy(GOOD)
    for path, value in at.items():
        *steps, last = path.split("__")
        part = manifest
        for step in steps:
            part = part.setdefault(step, {})
        if value is None:
            part.pop(last)
        else:
            part[last] = value
    return manifest


def template(role: str, **spec: Any) -> dict[str, Any]:
    return with_(**{f"spec__{role}__template__spec": spec})


TRAINS = {"name": "worker", "image": "me/digits:1"}

WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("no-spec", with_(spec=None), "spec: Required value"),
    ("no-storage", with_(spec__storage=None), "spec.storage: Required value"),
    ("storage-empty", with_(spec__storage={}), "set exactly one of uri, volumeClaim, ephemeral"),
    ("storage-twice", with_(spec__storage__ephemeral={}), "set exactly one of uri, volumeClaim, ephemeral"),
    ("storage-scheme", with_(spec__storage__uri="http://x/y"), "must be s3://bucket/path"),
    ("storage-nowhere", with_(spec__storage__uri="s3:///path"), "must be s3://bucket/path"),
    ("storage-of-a-host", with_(spec__storage__uri="file://x/y"), "or file:///path"),
    ("storage-slashes", with_(spec__storage__uri="s3://bucket//runs"), "write s3://bucket/path"),
    ("initial-slashes",
     with_(spec__training__initialFrom={"uri": "s3://bucket//runs/a"}), "one slash after the bucket of s3://"),
    ("claim-nameless", with_(spec__storage={"volumeClaim": {}}), "spec.storage.volumeClaim.name: Required value"),
    ("claim-name", with_(spec__storage={"volumeClaim": {"name": "My_Claim"}}), "the name of a PersistentVolumeClaim"),
    ("queue-name", with_(spec__runPolicy={"schedulingPolicy": {"queue": "My queue!"}}), "the name of a LocalQueue"),
    ("pool-name", with_(spec__workers__pools=["My pool"]), "must be the name of a CapacityPool"),
    ("minimum-above",
     with_(spec__workers={"replicas": 0, "minReplicas": 5, "maxReplicas": 2}),
     "minReplicas must not exceed maxReplicas"),
    ("no-training", with_(spec__training=None), "spec.training: Required value"),
    ("no-entrypoint", with_(spec__training__entrypoint=None), "spec.training.entrypoint: Required value"),
    ("entrypoint-of-a-file", with_(spec__training__entrypoint="digits.py:job"), "must be module:object, for example"),
    ("entrypoint", with_(spec__training__entrypoint="digits.py"), "must be module:object, for example digits:job"),
    ("no-stop", with_(spec__training__stopAfter={}), "set at least one of epochs, steps, or metric with value"),
    ("metric-alone", with_(spec__training__stopAfter={"metric": "accuracy"}), "spec.training.stopAfter.value"),
    ("value-alone",
     with_(spec__training__stopAfter={"epochs": 1, "value": 0.9}), "spec.training.stopAfter.metric"),
    *((f"value-{number}",
       with_(spec__training__stopAfter={"metric": "auc", "value": value}), "spec.training.stopAfter.value")
      for number, value in enumerate(["most", "1e999", True, [1], {"a": 1}])),
    *((f"never-reached-{value}",
       with_(spec__training__stopAfter={"metric": "val_accuracy", "value": value}), "spec.training.stopAfter.mode")
      for value in [1.5, 97, "97", "1.01", "10", "+2.5", "1.5e2", "9E+01"]),
    ("metric-own", with_(spec__training__stopAfter={"metric": "dice", "value": 0.9}), "mode is required for"),
    ("mode-alone", with_(spec__training__stopAfter={"epochs": 1, "mode": "Min"}), "mode requires metric and value"),
    ("mode-words",
     with_(spec__training__stopAfter={"metric": "dice", "value": 0.9, "mode": "max"}),
     'supported values: "Min", "Max"'),
    ("epochs-0", with_(spec__training__stopAfter__epochs=0), "should be greater than or equal to 1"),
    ("batch-0", with_(spec__training__batchSize=0), "batchSize in body should be greater than or equal to 1"),
    ("batch-twice",
     with_(spec__training__batchSizes=[{"accelerator": "T4", "batchSize": 8}] * 2),
     'spec.training.batchSizes[1]: Duplicate value: {"accelerator":"T4"}'),
    ("args-list", with_(spec__training__args=[0.1]), "must be of type object"),
    ("code-twice",
     with_(spec__training__code={"configMap": "a", "digest": "0" * 64}),
     "set exactly one of configMap, digest"),
    ("code-of-none", with_(spec__training__code={}), "set exactly one of configMap, digest"),
    ("code-digest", with_(spec__training__code={"digest": "abc"}), "must be a SHA-256: 64 hexadecimal digits"),
    ("code-nowhere",
     with_(spec__training__code={"digest": "0" * 64}, spec__storage={"ephemeral": {}}),
     "set storage.uri or volumeClaim"),
    ("run-of-nothing",
     with_(spec__storage={"ephemeral": {}, "run": "a"}),
     "a run that is to be continued needs a storage"),
    ("initial-scheme",
     with_(spec__training__initialFrom={"uri": "http://x/y"}),
     "spec.training.initialFrom.uri: Invalid value: \"http://x/y\": must be s3://bucket/path"),
    ("servers-pool", with_(spec__parameterServers={"pools": ["My pool"]}), "spec.parameterServers.pools"),
    ("workload-without-queue",
     with_(spec__runPolicy={"schedulingPolicy": {"queueAs": "Workload"}}),
     "queueAs Workload needs a queue"),
    ("workload-auto",
     with_(spec__runPolicy={"schedulingPolicy": {"queue": "team", "queueAs": "Workload"}},
           spec__elasticity={"mode": "Auto"}, spec__workers__maxReplicas=4),
     "Kueue chooses the nodes, and admits minReplicas: remove pools, onDemandBase, fallback and elasticity.mode"),
    ("workload-pools",
     with_(spec__runPolicy={"schedulingPolicy": {"queue": "team", "queueAs": "Workload"}},
           spec__workers__pools=["spot"]),
     "or set queueAs to Pods"),
    ("staleness", with_(spec__training__staleness={"policy": "Linear"}), '"Constant", "InverseSquareRoot", "Inverse"'),
    ("staleness-negative", with_(spec__training__staleness={"max": -1}), "should be greater than or equal to 0"),
    ("tls-word", with_(spec__training__dataTls="on"), "dataTls in body must be of type boolean"),
    ("no-workers", with_(spec__workers=None), "spec.workers: Required value"),
    ("workers-word", with_(spec__workers__replicas="two"), "must be of type integer"),
    ("workers-many", with_(spec__workers__maxReplicas=1), "lower replicas or raise maxReplicas"),
    ("workers-few", with_(spec__workers__minReplicas=3), "raise replicas or lower minReplicas"),
    ("surge", with_(spec__workers__maxSurge="200%"), "a non-negative integer, or a percentage in quotes"),
    ("surge-negative", with_(spec__workers__maxSurge=-1), "a non-negative integer, or a percentage in quotes"),
    ("servers-0", with_(spec__parameterServers={"replicas": 0}), "should be greater than or equal to 1"),
    ("servers-17", with_(spec__parameterServers={"replicas": 17}), "should be less than or equal to 16"),
    ("clean", with_(spec__runPolicy={"cleanPodPolicy": "Some"}), 'supported values: "None", "Running", "All"'),
    ("backoff",
     with_(spec__runPolicy={"backoffLimit": -1}),
     "backoffLimit in body should be greater than or equal to 0"),
    ("deadline-of-ages",
     with_(spec__runPolicy={"activeDeadlineSeconds": 10**12}),
     "activeDeadlineSeconds in body should be less than or equal to 2147483647"),
    ("rule-0",
     with_(spec__runPolicy={"failureRules": [{"onExitCodes": [0], "action": "Ignore"}]}),
     "greater than or equal to 1"),
    ("rule-action", with_(spec__runPolicy={"failureRules": [{"onExitCodes": [1], "action": "Retry"}]}), '"FailJob"'),
    ("long-name", with_(metadata__name="x" * 41), "metadata.name must be at most 40 characters"),
    ("dotted-name", with_(metadata__name="my.job"), "must begin with a letter and contain only a-z, 0-9"),
    ("typing-error", with_(spec__workers__replica=3), 'unknown field "spec.workers.replica"'),
    ("auto-of-nothing", with_(spec__elasticity={"mode": "Auto"}), "Advise and Auto need workers.pools"),
    ("auto-without-end",
     with_(spec__elasticity={"mode": "Auto"}, spec__workers__pools=["spot"]),
     "Auto needs workers.maxReplicas: set the most workers"),
    ("manual-objective", with_(spec__elasticity={"objective": {"deadlineSeconds": 4}}), "set mode, or remove"),
    ("manual-cost",
     with_(spec__elasticity={"objective": {"maxCost": 4}}),
     'spec.elasticity.mode: Unsupported value: "Manual": supported values: "Advise", "Auto"'),
    ("cost", with_(spec__elasticity={"mode": "Auto", "objective": {"maxCost": "$4"}}), "maxCost in body should match"),
    ("cost-negative",
     with_(spec__elasticity={"mode": "Auto", "objective": {"maxCost": -4}}),
     "maxCost in body should be greater than or equal to 0"),
    ("base", with_(spec__workers__onDemandBase=9, spec__workers__maxReplicas=8), "onDemandBase must not exceed"),
    ("fallback-of-none", with_(spec__workers__capacity="Any", spec__workers__fallback={}), "set capacity to Spot"),
    ("twice-a-pool", with_(spec__workers__pools=["a", "a"]), "Duplicate value"),
    ("run-name", with_(spec__storage__run="My/Run"), "it names a folder"),
    ("container", template("workers", containers=[{"name": "main"}]), "one container must be named worker"),
    ("container-ps", template("parameterServers", containers=[TRAINS]), "one container must be named ps"),
    ("container-twice", template("workers", containers=[TRAINS, TRAINS]), "container names must be unique"),
    ("env-text", template("workers", containers=[{**TRAINS, "env": ["A=1"]}]), 'env[0] in body must be of type object'),
    ("env-nameless",
     template("workers", containers=[{**TRAINS, "env": [{"nmae": "A", "value": "1"}]}]),
     "env[0].name: Required value"),
    ("env-map",
     template("workers", containers=[{**TRAINS, "env": {"A": "1"}}]),
     'unknown field "spec.workers.template.spec.containers[0].env.A"'),
    ("quantity",
     template("workers", containers=[{**TRAINS, "resources": {"limits": {"cpu": "100mm"}}}]),
     'containers[0].resources.limits.cpu: Invalid value: "100mm"'),
    ("quantity-init",
     template("workers", initContainers=[{"name": "a", "resources": {"requests": {"memory": "2GB"}}}]),
     "(n|u|m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|"),
    ("quantity-volume",
     template("workers", containers=[TRAINS], volumes=[{"name": "shm", "emptyDir": {"sizeLimit": "2GB"}}]),
     'template.spec.volumes[0].emptyDir.sizeLimit: Invalid value: "2GB"'),
    ("env-number",
     template("workers", containers=[{**TRAINS, "env": [{"name": "A", "value": 1}]}]),
     'containers[0].env[0].value in body must be of type string: "integer"'),
    ("label-yes",
     template("workers", containers=[TRAINS], nodeSelector={"gpu": True}),
     'template.spec.nodeSelector.gpu in body must be of type string: "boolean"'),
    ("terms",
     template("workers", containers=[TRAINS],
              affinity={"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution":
                  {"nodeSelectorTerms": [{"matchExpressions": [{"key": f"k{i}", "operator": "Exists"}]}
                                         for i in range(33)]}}}),
     "nodeSelectorTerms: Too many: 33: must have at most 32 items"),
    ("tolerations",
     template("workers", containers=[TRAINS], tolerations=[{"key": f"k{i}", "operator": "Exists"} for i in range(257)]),
     "tolerations: Too many: 257: must have at most 256 items"),
    ("variables",
     template("workers", containers=[{**TRAINS, "env": [{"name": f"V{i}", "value": "x"} for i in range(1025)]}]),
     "env: Too many: 1025: must have at most 1024 items"),
    ("grace-text",
     template("workers", containers=[TRAINS], terminationGracePeriodSeconds="30"),
     'template.spec.terminationGracePeriodSeconds in body must be of type integer: "string"'),
    ("restart", template("workers", restartPolicy="Always"), "restartPolicy is set by Shoal"),
    ("node-name", template("workers", nodeName="n"), "use nodeSelector"),
    ("host-network", template("workers", hostNetwork=True), "hostNetwork would open the job's ports on the node"),
    (
        "our-label",
        with_(spec__workers__template__metadata={"labels": {"shoal.dev/role": "ps"}}),
        "keys under shoal.dev/ are reserved for the operator",
    ),
]  # fmt: skip


async def refusal(kube: Kube, manifest: Any) -> str:
    """What the server says of a manifest when it is asked as `kubectl apply --dry-run=server` asks; "": it takes it."""
    path = "/apis/shoal.dev/v1alpha1/namespaces/default/trainingjobs"
    try:
        await kube.request("POST", path, manifest, params={"dryRun": "All", "fieldValidation": "Strict"})
    except ApiError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("manifest", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG]
)
async def test_invalid_manifest_is_rejected_with_a_message(kube: Kube, manifest: Any, message: str) -> None:
    assert message in await refusal(kube, manifest)


WRONG_IN_ROLES: list[dict[str, Any]] = [
    {"spec": {"containers": [{"name": "main"}]}},
    {"spec": {"containers": [{"name": "a"}, {"name": "a"}]}},
    {"spec": {"restartPolicy": "Always"}},
    {"spec": {"hostname": "a"}},
    {"spec": {"subdomain": "a"}},
    {"spec": {"nodeName": "n"}},
    {"spec": {"hostNetwork": True}},
    {"metadata": {"labels": {"shoal.dev/role": "ps"}}},
    {"metadata": {"annotations": {"shoal.dev/role": "ps"}}},
]
WRONG_PROFILE = {
    **{key: GOOD[key] for key in ("apiVersion", "metadata")},
    "kind": "SpeedProfile",
    "spec": {"convergence": {"r1": 1, "r2": 0, "r3": 1, "r4": 0, "leastBatch": 9, "mostBatch": 8}},
}


def schema_of(plural: str) -> Any:
    """What the CRD of the checkout says of objects as people write them."""
    [version] = yaml.safe_load(Path(f"crds/shoal.dev_{plural}.yaml").read_text())["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["properties"].pop("status")
    return schema


def rules_of(schema: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Where each rule is that looks at one version alone, and what it says; of a list or map, at its items, too."""
    for rule in schema.get("x-kubernetes-validations", ()):
        if "oldSelf" not in rule["rule"]:
            yield path, rule.get("message", "")
    for name, each in schema.get("properties", {}).items():
        yield from rules_of(each, f"{path}.{name}".lstrip("."))
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from rules_of(schema[name], path)


async def test_each_rule_refuses_one_of_these(kube: Kube) -> None:
    """Else nobody would notice that it is gone: the API server then takes what the operator cannot run."""
    wrong = [case[1] for case in WRONG]
    for role in ("workers", "parameterServers"):
        wrong += [with_(**{f"spec__{role}__template": each}) for each in WRONG_IN_ROLES]
    refused = set()
    for manifest in (*wrong, WRONG_PROFILE):
        plural = f"{manifest['kind'].lower()}s"
        path = f"/apis/shoal.dev/v1alpha1/namespaces/default/{plural}"
        with pytest.raises(ApiError) as error:
            await kube.request("POST", path, manifest, params={"dryRun": "All", "fieldValidation": "Strict"})
        for cause in error.value.body.get("details", {}).get("causes", ()):
            field = re.sub(r"\[[^]]*\]", "", cause["field"]).removeprefix("<nil>")
            refused.add((plural, field, cause["message"]))
    for name in ("trainingjobs", "speedprofiles"):
        missing = [
            f"{field}: {said}"
            for field, said in rules_of(schema_of(name))
            if not any(k == name and f == field and said in words for k, f, words in refused)
        ]
        assert not missing, "\n".join(missing)


@pytest.mark.parametrize("name", ["storage-scheme", "storage-twice", "typing-error", "env-number"])
def test_kubectl_prints_what_the_server_says(control_plane: ControlPlane, name: str) -> None:
    """Of a rule, of several causes, of a field that there is not, and of a wrong type."""
    [(manifest, message)] = [case[1:] for case in WRONG if case[0] == name]
    done = kubectl(control_plane, "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))
    assert done.returncode != 0
    assert message in done.stderr


CANNOT_CHANGE: list[tuple[str, dict[str, Any], str]] = [
    ("managed-by", {"managedBy": "me.example/other"}, "managedBy is immutable"),
    (
        "storage",
        {"storage": {"uri": "s3://other/runs"}},
        "spec.storage.uri: Invalid value: uri is immutable: delete the job first, or choose another name",
    ),
    (
        "training",
        {"training": {"batchSize": 7}},
        "spec.training.batchSize: Invalid value: batchSize is immutable",
    ),
    (
        "argument",
        {"training": {"args": {"rate": 0.2}}},
        "spec.training.args: Invalid value: args is immutable",
    ),
    ("argument-list", {"training": {"args": {"layers": [64, 33]}}}, "args is immutable"),
    (
        "shards",
        {"parameterServers": {"replicas": 2}},
        "only while the job is suspended: set suspend to true first",
    ),
]


def test_renamed_argument_is_the_operators_to_refuse(control_plane: ControlPlane, namespace: str) -> None:
    """The API server compares those fields of unknown objects that both have (`TrainingSpec.args_digest`)."""
    first, renamed = (
        {**GOOD["spec"]["training"], "args": args} for args in ({"rate": 0.1}, {"momentum": 0.1})
    )
    for training in (first, renamed):
        job = {**GOOD, "spec": {**GOOD["spec"], "training": training}}
        kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(job)).check_returncode()
    found = json.loads(kubectl(control_plane, "get", "-n", namespace, "etj", "good", "-o", "json").stdout)
    assert found["spec"]["training"]["args"] == {"momentum": 0.1}


@pytest.mark.parametrize(
    ("change", "message"), [c[1:] for c in CANNOT_CHANGE], ids=[c[0] for c in CANNOT_CHANGE]
)
def test_immutable_fields_are_rejected(
    control_plane: ControlPlane, namespace: str, change: Any, message: str
) -> None:
    kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD))
    patch = json.dumps({"spec": change})
    done = kubectl(control_plane, "patch", "-n", namespace, "etj", "good", "--type=merge", "-p", patch)
    assert done.returncode != 0
    assert message in done.stderr


def test_the_target_of_a_metric_is_immutable(control_plane: ControlPlane, namespace: str) -> None:
    manifest = with_(spec__training__stopAfter={"metric": "accuracy", "value": 0.9})
    done = kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    assert done.returncode == 0, done.stderr
    manifest = with_(spec__training__stopAfter={"metric": "accuracy", "value": "0.95"})
    done = kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    assert "stopAfter is immutable" in done.stderr


def test_valid_manifest_gets_its_defaults(control_plane: ControlPlane, namespace: str) -> None:
    assert kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD)).returncode == 0
    spec = json.loads(kubectl(control_plane, "get", "-n", namespace, "etj", "good", "-o", "json").stdout)[
        "spec"
    ]
    assert spec["runPolicy"] == {
        "backoffLimit": 6,
        "cleanPodPolicy": "Running",
        "forceDeleteAfterSeconds": 60,
        "schedulingPolicy": {"gang": "None", "queue": "", "queueAs": "Pods"},
    }
    snapshot = {"everySeconds": 60, "retain": 3}
    assert spec["parameterServers"] == {"replicas": 1, "capacity": "OnDemand", "snapshot": snapshot}
    assert spec["workers"] == {
        "replicas": 2,
        "minReplicas": 1,
        "maxSurge": "25%",
        "capacity": "Spot",
        "zonePolicy": "Any",
        "onDemandBase": 0,
    }
    assert spec["elasticity"] == {
        "mode": "Manual",
        "objective": {"confidence": 0.95, "prefer": "MinCost"},
        "stabilizationSeconds": {"up": 30, "down": 300},
    }
    assert spec["training"]["args"] == {"rate": 0.1, "layers": [64, 32], "augment": True}
    assert spec["training"]["batchSize"] == 32
    assert spec["training"]["staleness"] == {"policy": "InverseSquareRoot", "rounds": True}
    assert spec["training"]["dataTls"] is False
    assert spec["suspend"] is False


@pytest.mark.parametrize(
    "stop",
    [
        {"metric": "dice", "value": 0.9, "mode": "Max"},
        {"metric": "val_sparse_categorical_crossentropy", "value": 1e-3},
        {"metric": "auc_1", "value": 0.9},
        {"metric": "accuracy", "value": 1},
        {"metric": "loss", "value": 0},
        {"metric": "accuracy", "value": "0.97"},
        {"metric": "accuracy", "value": "1"},
        {"metric": "accuracy", "value": "1.5e-1"},
        {"metric": "accuracy", "value": "97", "mode": "Max"},
        {"metric": "loss", "value": "97"},
        {"metric": "loss", "value": "1e-3"},
    ],
)
async def test_metric_target_is_accepted(kube: Kube, stop: Any) -> None:
    assert await refusal(kube, with_(spec__training__stopAfter=stop)) == ""


def test_numbers_are_kept_as_they_are_written(control_plane: ControlPlane, namespace: str) -> None:
    """YAML as people write it, where nothing needs quotes; and Shoal reads what the server answers."""
    manifest = """
        apiVersion: shoal.dev/v1alpha1
        kind: TrainingJob
        metadata: {name: numbers}
        spec:
          storage: {ephemeral: {}}
          training:
            entrypoint: digits:job
            args: {rate: 0.1, factor: 1e-3, whole: 1.0, layers: [64, 0.5], version: "1.10"}
            stopAfter: {metric: accuracy, value: 0.97}
          workers: {replicas: 1, maxReplicas: 4, pools: [a]}
          elasticity: {mode: Auto, objective: {maxCost: 12.5}}
    """
    done = kubectl(control_plane, "apply", "-n", namespace, "-o", "json", "-f", "-", stdin=manifest)
    assert done.returncode == 0, done.stderr
    job = TrainingJob.model_validate_json(done.stdout)
    assert job.spec.training.stop_after.value == 0.97
    assert job.spec.elasticity.objective.max_cost == 12.5
    args = {"rate": 0.1, "factor": 0.001, "whole": 1, "layers": [64, 0.5], "version": "1.10"}
    assert job.spec.training.args.read() == args
    again = kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=manifest)
    assert again.stdout == "trainingjob.shoal.dev/numbers unchanged\n"


@pytest.mark.parametrize("written", [float, str])
def test_prices_of_a_pool_are_numbers_in_quotes_or_not(control_plane: ControlPlane, written: Any) -> None:
    manifest = cpu_pool(
        written(0.5),
        price={"perHour": written(0.28)},
        interruptionsPerHour=written(0.05),
        transferPerGiB=written(0.01),
    )
    try:
        done = kubectl(control_plane, "apply", "-o", "json", "-f", "-", stdin=manifest)
        assert done.returncode == 0, done.stderr
        spec = CapacityPool.model_validate_json(done.stdout).spec
        assert spec.price is not None
        assert (spec.price.per_hour, spec.interruptions_per_hour) == (0.28, 0.05)
        assert (spec.transfer_per_gib, spec.core_count) == (0.01, 0.5)
        table = kubectl(control_plane, "get", "cpool", "a", "--no-headers").stdout.split()
        assert "0.28" in table
    finally:
        kubectl(control_plane, "delete", "cpool", "a", "--ignore-not-found")


def test_staleness_of_zero_and_data_tls_are_accepted(control_plane: ControlPlane) -> None:
    manifest = json.dumps(with_(spec__training__staleness={"max": 0}, spec__training__dataTls=True))
    done = kubectl(control_plane, "apply", "--dry-run=server", "-f", "-", stdin=manifest)
    assert done.returncode == 0, done.stderr


def test_shards_can_change_while_suspended(control_plane: ControlPlane, namespace: str) -> None:
    kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(with_(spec__suspend=True)))
    patch = json.dumps({"spec": {"parameterServers": {"replicas": 2}}})
    done = kubectl(control_plane, "patch", "-n", namespace, "etj", "good", "--type=merge", "-p", patch)
    assert done.returncode == 0, done.stderr


def test_kubectl_scale_within_the_limits(control_plane: ControlPlane, namespace: str) -> None:
    manifest = with_(spec__workers__maxReplicas=4)
    kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    scaled = kubectl(control_plane, "scale", "-n", namespace, "etj/good", "--replicas=4")
    assert scaled.returncode == 0, scaled.stderr
    too_far = kubectl(control_plane, "scale", "-n", namespace, "etj/good", "--replicas=5")
    assert too_far.returncode != 0
    assert "lower replicas or raise maxReplicas" in too_far.stderr


def test_template_keeps_unknown_fields(control_plane: ControlPlane, namespace: str) -> None:
    container = {**TRAINS, "resources": {"limits": {"nvidia.com/gpu": 1}}, "fieldOfTomorrow": {"a": [1]}}
    manifest = template("workers", containers=[container], runtimeClassName="gvisor")
    kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    kept = json.loads(kubectl(control_plane, "get", "-n", namespace, "etj", "good", "-o", "json").stdout)
    assert kept["spec"]["workers"]["template"]["spec"] == manifest["spec"]["workers"]["template"]["spec"]


@pytest.mark.nightly
def test_a_job_with_longer_lists_than_are_allowed_now_lives_on(
    control_plane: ControlPlane, namespace: str
) -> None:
    """An upgrade of the CRD must not end the writes of a status: what did not change is not judged again."""
    now = yaml.safe_load(Path("crds/shoal.dev_trainingjobs.yaml").read_text())
    now["metadata"]["name"], now["spec"]["group"] = "oldjobs.before.example.com", "before.example.com"
    now["spec"]["names"] = {
        "plural": "oldjobs",
        "singular": "oldjob",
        "kind": "OldJob",
        "listKind": "OldJobList",
    }
    before = json.loads(json.dumps(now).replace('"maxItems": 256', '"maxItems": 512'))
    many = [{"key": f"k{i}", "operator": "Exists"} for i in range(300)]
    job = template("workers", containers=[TRAINS], tolerations=many)
    job |= {"apiVersion": "before.example.com/v1alpha1", "kind": "OldJob"}
    there = ("-n", namespace, "oldjob", "good")

    def apply(manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return kubectl(
            control_plane, "apply", "--server-side", "-n", namespace, "-f", "-", stdin=json.dumps(manifest)
        )

    try:
        assert apply(before).returncode == 0
        assert eventually(lambda: apply(job).stdout), apply(job).stderr
        assert apply(now).returncode == 0
        another = {**job, "metadata": {"name": "another"}}
        assert eventually(lambda: apply(another).stderr).count("must have at most 256 items") == 1
        status = json.dumps({"status": {"phase": "Running"}})
        done = kubectl(control_plane, "patch", *there, "--subresource=status", "--type=merge", "-p", status)
        assert done.returncode == 0, done.stderr
        scaled = kubectl(
            control_plane, "patch", *there, "--type=merge", "-p", '{"spec": {"workers": {"replicas": 3}}}'
        )
        assert scaled.returncode == 0, scaled.stderr
    finally:
        kubectl(control_plane, "delete", "crd", now["metadata"]["name"])


REMOVABLE = ("affinity", "tolerations", "securityContext", "terminationGracePeriodSeconds")


@pytest.mark.by_day(2)
@pytest.mark.parametrize("field", [*REMOVABLE, "envFrom", "ports", "volumeMounts", "readinessProbe"])
def test_a_null_removes_what_shoal_sets(control_plane: ControlPlane, namespace: str, field: str) -> None:
    """`kubectl create`, since `kubectl apply` takes a null for a field that is to be removed."""
    in_spec = field in REMOVABLE
    container = TRAINS if in_spec else {**TRAINS, field: None}
    manifest = template("workers", containers=[container], **({field: None} if in_spec else {}))
    done = kubectl(control_plane, "create", "-n", namespace, "-f", "-", stdin=json.dumps(manifest))
    assert done.returncode == 0, done.stderr
    kept = json.loads(kubectl(control_plane, "get", "-n", namespace, "etj", "good", "-o", "json").stdout)
    spec = kept["spec"]["workers"]["template"]["spec"]
    assert (spec if in_spec else spec["containers"][0])[field] is None


@pytest.mark.parametrize("cpu", ["500m", 2, "2", "0.5", ".5", "2.", "+1", "1e3", "12E-1", "3k", "8Gi", "5E"])
async def test_a_quantity_is_accepted(kube: Kube, cpu: int | str) -> None:
    manifest = template("workers", containers=[{**TRAINS, "resources": {"requests": {"cpu": cpu}}}])
    assert await refusal(kube, manifest) == ""


def test_kubectl_explain_shows_descriptions(control_plane: ControlPlane) -> None:
    def explained(field: str) -> str:
        return kubectl(control_plane, "explain", field).stdout

    fields = {
        "etj": "keeps training while its spot workers come and go",
        "etj.spec": "on spot nodes. They may join and leave",
        "etj.spec.storage": "set exactly one of the fields",
        "etj.spec.workers.maxSurge": "alongside pods that are still terminating",
        "etj.spec.training.entrypoint": "in the worker image",
        "etj.spec.runPolicy.cleanPodPolicy": "ENUM: None Running All",
        "etj.status.restarts.disruptions": "Workers that the platform disrupted",
    }
    for field, words in fields.items():
        output = eventually(partial(explained, field))
        assert words in " ".join(output.split()), output


def test_every_field_has_a_description(control_plane: ControlPlane) -> None:
    crd = kubectl(control_plane, "get", "crd", "trainingjobs.shoal.dev", "-o", "json").stdout
    schema = json.loads(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    missing: list[str] = []

    def walk(part: dict[str, Any], path: str) -> None:
        for name, field in part.get("properties", {}).items():
            if not field.get("description") and name != "metadata":
                missing.append(f"{path}.{name}")
            walk(field, f"{path}.{name}")
        if "items" in part:
            walk(part["items"], f"{path}[]")

    walk(schema, "")
    assert missing == []


def test_printer_columns(control_plane: ControlPlane, namespace: str) -> None:
    kubectl(control_plane, "apply", "-n", namespace, "-f", "-", stdin=json.dumps(GOOD))
    narrow = kubectl(control_plane, "get", "-n", namespace, "etj").stdout.splitlines()[0].split()
    assert narrow == [
        "NAME",
        "PHASE",
        "PS",
        "WORKERS",
        "DESIRED",
        "SAMPLES/S",
        "PROGRESS(%)",
        "DISRUPTIONS",
        "PS-RESTARTS",
        "REASON",
        "AGE",
    ]
    wide = kubectl(control_plane, "get", "-n", namespace, "etj", "-o", "wide").stdout.splitlines()[0].split()
    assert wide[-5:] == ["ETA(S)", "LAST-STEP", "SPENT", "PLAN", "FAILURES"]


@pytest.mark.parametrize("path", sorted(Path("examples").rglob("*.yaml")), ids=lambda p: p.name)
def test_examples_are_accepted(control_plane: ControlPlane, path: Path) -> None:
    jobs = [
        d
        for d in yaml.safe_load_all(path.read_text())
        if isinstance(d, dict) and d.get("kind") == "TrainingJob"
    ]
    for manifest in jobs:
        done = kubectl(control_plane, "apply", "--dry-run=server", "-f", "-", stdin=yaml.safe_dump(manifest))
        assert done.returncode == 0, done.stderr


def cpu_pool(cores: Any, **more: Any) -> str:
    spec = {"cores": cores, "limits": {"nodes": 1}, "nodeSelector": {"example.com/pool": "a"}, **more}
    return json.dumps(
        {"apiVersion": "shoal.dev/v1alpha1", "kind": "CapacityPool", "metadata": {"name": "a"}, "spec": spec}
    )


@pytest.mark.by_day(3)
@pytest.mark.parametrize("cores", [1, 64, 0.3, 2.0, 4096, "0.3", "0.05", "2", "4095.999", "4096", "4096.0"])
def test_cores_of_a_pool_may_be_a_share_of_one(control_plane: ControlPlane, cores: Any) -> None:
    done = kubectl(control_plane, "apply", "--dry-run=server", "-f", "-", stdin=cpu_pool(cores))
    assert done.returncode == 0, done.stderr


@pytest.mark.by_day(3)
@pytest.mark.parametrize("cores", [0, 5000, -1, 0.0, "0", "0.000", "half", "-1", "5000", "4096.5", "50000"])
def test_cores_that_are_none_are_refused(control_plane: ControlPlane, cores: Any) -> None:
    done = kubectl(control_plane, "apply", "--dry-run=server", "-f", "-", stdin=cpu_pool(cores))
    assert "spec.cores in body should" in done.stderr


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"price": {"perHour": "cheap"}}, "spec.price.perHour in body should match"),
        ({"price": {"perHour": "-1"}}, "spec.price.perHour in body should match"),
        ({"price": {"perHour": -1}}, "spec.price.perHour in body should be greater than or equal to 0"),
        ({"interruptionsPerHour": "5%"}, "spec.interruptionsPerHour in body should match"),
        ({"transferPerGiB": -0.01}, "spec.transferPerGiB in body should be greater than or equal to 0"),
        (
            {"tolerations": [{"key": "k", "operator": "Exists", "value": "v"}]},
            "operator Exists takes any value",
        ),
        ({"tolerations": [{"effect": "NoSchedule"}]}, "needs operator Exists: set key or operator"),
        (
            {"tolerations": [{"key": "a b"}]},
            'spec.tolerations[0].key: Invalid value: "a b": no taint has such a key',
        ),
        (
            {"tolerations": [{"key": "k", "value": "a b"}]},
            "no label or taint has such a value: at most 63 letters",
        ),
        ({"zone": "eu west"}, 'spec.zone: Invalid value: "eu west": no label or taint has such a value'),
        (
            {"nodeSelector": {"pool": "a b"}},
            'spec.nodeSelector[pool]: Invalid value: "a b": no label or taint has such a value',
        ),
        ({"nodeSelector": {"pool": "a" * 64}}, "spec.nodeSelector.pool: Too long"),
        ({"nodeSelector": {"my pool": "a"}}, "spec.nodeSelector: Invalid value: no node has such a label"),
        ({"nodeSelector": {"/pool": "a"}}, "spec.nodeSelector: Invalid value: no node has such a label"),
        ({"nodeSelector": {"a/b/c": "a"}}, "spec.nodeSelector: Invalid value: no node has such a label"),
    ],
)
def test_what_is_wrong_with_a_pool_is_named(
    control_plane: ControlPlane, spec: dict[str, Any], said: str
) -> None:
    done = kubectl(
        control_plane, "apply", "--dry-run=server", "-f", "-", stdin=cpu_pool(**{"cores": 2, **spec})
    )
    assert done.returncode == 1
    assert said in done.stderr


def with_name(manifest: str, name: str, **more: Any) -> str:
    pool = json.loads(manifest)
    return json.dumps({**pool, "metadata": {"name": name}, **more})


@pytest.mark.parametrize("more", [{}, {"status": {"nodes": 1}}], ids=["", "with a status"])
def test_a_pool_that_no_job_can_name_is_refused(control_plane: ControlPlane, more: dict[str, Any]) -> None:
    for length, said in ((63, ""), (64, "metadata.name must be at most 63 characters")):
        manifest = with_name(cpu_pool(2), "a" * length, **more)
        done = kubectl(control_plane, "create", "--dry-run=server", "-f", "-", stdin=manifest)
        assert (done.returncode == 0) == (not said), done.stderr
        assert said in done.stderr


def of_another_group(plural: str, kind: str) -> dict[str, Any]:
    """This CRD under the name of another kind, of which a test may apply an older one."""
    crd: dict[str, Any] = yaml.safe_load(Path(f"crds/shoal.dev_{plural}.yaml").read_text())
    singular = kind.lower()
    crd["metadata"]["name"], crd["spec"]["group"] = f"{singular}s.before.example.com", "before.example.com"
    names = {"plural": f"{singular}s", "singular": singular, "kind": kind, "listKind": f"{kind}List"}
    crd["spec"]["names"] = names
    return crd


@pytest.mark.nightly
def test_a_job_whose_storage_is_refused_now_lives_on(control_plane: ControlPlane) -> None:
    """One that was stored before: its status is written, and it is suspended."""
    now = of_another_group("trainingjobs", "OldJob")
    before = copy.deepcopy(now)
    validations = before["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["x-kubernetes-validations"]
    validations[:] = [each for each in validations if "s3://" not in each["message"]]

    def apply(manifest: dict[str, Any]) -> subprocess.CompletedProcess[str]:
        return kubectl(control_plane, "apply", "--server-side", "-f", "-", stdin=json.dumps(manifest))

    def refused() -> str:
        new = json.dumps(job("b"))
        return kubectl(control_plane, "create", "--dry-run=server", "-f", "-", stdin=new).stderr

    def job(name: str) -> dict[str, Any]:
        manifest = with_(spec__storage__uri="s3://bucket//runs", metadata__name=name)
        return {**manifest, "apiVersion": "before.example.com/v1alpha1", "kind": "OldJob"}

    def patch(change: dict[str, Any], *words: str) -> None:
        done = kubectl(
            control_plane, "patch", "oldjob", "a", "--type=merge", "-p", json.dumps(change), *words
        )
        assert done.returncode == 0, done.stderr

    try:
        assert apply(before).returncode == 0
        assert eventually(lambda: apply(job("a")).stdout)
        assert apply(now).returncode == 0
        assert "write s3://bucket/path" in eventually(refused)
        for phase in ("Pending", "Failed"):
            patch({"status": {"phase": phase}}, "--subresource=status")
        patch({"spec": {"suspend": True}})
        assert apply(job("a")).returncode == 0
    finally:
        kubectl(control_plane, "delete", "crd", now["metadata"]["name"])


@pytest.mark.nightly
def test_a_pool_that_no_job_can_name_lives_on(control_plane: ControlPlane) -> None:
    """One that was stored before: its status is written, its size changed, and its finalizer goes."""
    now = of_another_group("capacitypools", "OldPool")
    before = json.loads(json.dumps(now).replace(".size() <= 63", ".size() <= 253"))
    names = ["a" * 64, "b" * 64]

    def apply(manifest: str) -> subprocess.CompletedProcess[str]:
        return kubectl(control_plane, "apply", "--server-side", "-f", "-", stdin=manifest)

    def pool(name: str) -> str:
        kind = {"apiVersion": "before.example.com/v1alpha1", "kind": "OldPool"}
        return with_name(cpu_pool(2), name, **kind)

    def patch(name: str, change: dict[str, Any], *words: str) -> None:
        done = kubectl(
            control_plane, "patch", "oldpool", name, "--type=merge", "-p", json.dumps(change), *words
        )
        assert done.returncode == 0, done.stderr

    try:
        assert apply(json.dumps(before)).returncode == 0
        assert eventually(lambda: apply(pool(names[0])).stdout)
        assert apply(pool(names[1])).returncode == 0
        patch(names[0], {"status": {"nodes": 1}}, "--subresource=status")
        assert apply(json.dumps(now)).returncode == 0
        assert "at most 63 characters" in eventually(lambda: apply(pool("c" * 64)).stderr)
        patch(names[1], {"status": {"nodes": 1}}, "--subresource=status")
        for name in names:
            patch(name, {"status": {"nodes": 2}}, "--subresource=status")
            patch(name, {"metadata": {"finalizers": ["example.com/kept"]}, "spec": {"limits": {"nodes": 2}}})
            patch(name, {"metadata": {"finalizers": None}})
            assert kubectl(control_plane, "delete", "oldpool", name).returncode == 0
    finally:
        kubectl(control_plane, "delete", "crd", now["metadata"]["name"])


@pytest.mark.parametrize(
    "spec",
    [
        {"nodeSelector": {}},
        {"nodeSelector": {"a": ""}},
        {"nodeSelector": {"example.com/Node_pool.1": "L4_spot.1"}, "zone": "europe-west1-b"},
        {"nodeSelector": {f"{'a' * 253}/{'b' * 63}": "c" * 63} | {f"k{n}": "v" for n in range(31)}},
        {
            "tolerations": [
                {"operator": "Exists"},
                {"key": "", "operator": "Exists"},
                {"key": "a.b/c", "value": ""},
            ]
        },
    ],
)
def test_labels_and_taints_that_nodes_can_have_are_accepted(
    control_plane: ControlPlane, spec: dict[str, Any]
) -> None:
    done = kubectl(
        control_plane, "apply", "--dry-run=server", "-f", "-", stdin=cpu_pool(**{"cores": 2, **spec})
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("model", "row", "said"),
    [
        ({"flopsPerSample": -5}, {}, "spec.model.flopsPerSample in body should be greater than 0"),
        ({"flopsPerSample": "0.0"}, {}, "spec.model.flopsPerSample in body should match"),
        ({}, {"stepSeconds": 0}, "spec.rows[0].stepSeconds in body should be greater than 0"),
        ({}, {"pushSeconds": "-1"}, "spec.rows[0].pushSeconds in body should match"),
        ({"flopsPerSample": "8.2e+7"}, {"stepSeconds": "0.05", "pushSeconds": 0}, ""),
    ],
)
def test_a_profile_has_no_times_below_nothing(
    control_plane: ControlPlane, model: dict[str, Any], row: dict[str, Any], said: str
) -> None:
    spec = {
        "model": {"flopsPerSample": 1e9, "parameters": 1000, "tensors": 4, **model},
        "rows": [{"accelerator": "T4", "batchSize": 8, "stepSeconds": 0.1, **row}],
    }
    manifest = {
        "apiVersion": "shoal.dev/v1alpha1",
        "kind": "SpeedProfile",
        "metadata": {"name": "a"},
        "spec": spec,
    }
    done = kubectl(control_plane, "apply", "--dry-run=server", "-f", "-", stdin=json.dumps(manifest))
    assert done.returncode == bool(said), done.stderr
    assert said in done.stderr
