"""The values of the chart: which of them install it, and which are refused."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from dev.images import IMAGES
from dev.paths import ROOT
from dev.publish import install_command
from tests.chart.rendered import (
    CHART,
    EVERYTHING,
    IMAGES_SET,
    container_of,
    environment_of,
    flags,
    helm,
    of_kind,
    pod_of,
    refusal,
    render,
    template,
    templated,
)
from tests.unit.docs.pages import read, section


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
    image = container_of(template(tools, *words[2:]))["image"]
    assert image in {IMAGES["operator"].reference, "registry.example.com/team/shoal-operator:1"}


def test_two_renderings_are_the_same(tools: Path) -> None:
    once = render(tools, *EVERYTHING)
    templated.cache_clear()
    assert render(tools, *EVERYTHING) == once
    assert of_kind(render(tools), "Secret") == []


def test_values_that_neighbours_have(tools: Path) -> None:
    digest = "sha256:" + "a" * 64
    documents = render(
        tools, "nameOverride=other", f"image.digest={digest}", "probes.liveness.periodSeconds=33",
        "podDisruptionBudget.enabled=false",
        "topologySpreadConstraints[0].maxSkew=1", "topologySpreadConstraints[0].topologyKey=zone",
        "topologySpreadConstraints[0].whenUnsatisfiable=DoNotSchedule", "rbac.aggregateRoles=false",
    )  # fmt: skip
    [deployment] = of_kind(documents, "Deployment")
    spec, container = pod_of(documents), container_of(documents)
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
        for d in render(tools, "rbac.create=false")
        if "Role" in d["kind"] and "shoal-t" not in d["metadata"]["name"]
    ]


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
        "extraVolumes[0].name=tmp",
        "extraVolumes[0].name=install-key",
        "extraVolumeMounts[0].mountPath=/tmp",
        "pools.extraVolumes[0].name=tmp",
        "pools.extraVolumeMounts[0].mountPath=/tmp",
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


def test_volumes_of_the_chart_are_there_once(tools: Path) -> None:
    """The API server refuses two of one name, and two in one place."""
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    documents = render(tools, "pools.enabled=true")
    for deployment, properties in (("shoal", schema), ("shoal-pools", schema["pools"]["properties"])):
        volumes = properties["extraVolumes"]["items"]["properties"]["name"]["not"]["enum"]
        places = properties["extraVolumeMounts"]["items"]["properties"]["mountPath"]["not"]["enum"]
        assert volumes == sorted(each["name"] for each in pod_of(documents, deployment)["volumes"])
        assert places == sorted(
            each["mountPath"] for each in container_of(documents, deployment)["volumeMounts"]
        )


def test_variables_of_the_chart_are_set_once(tools: Path) -> None:
    """The schema keeps them out of extraEnv: a variable that is there twice breaks a later server-side apply."""
    everything = (
        *("kueue.enabled=true", "page.enabled=true", "pools.enabled=true", "trainer.workerGpuImage=r.io/g:1"),
        *("spotLabels.a=b", "spotTaints.a=b", "scope.namespace=a", "page.hosts={a}"),
    )
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    documents = render(tools, *everything)
    for deployment, properties in (("shoal", schema), ("shoal-pools", schema["pools"]["properties"])):
        refused = properties["extraEnv"]["items"]["properties"]["name"]["not"]["enum"]
        assert refused == sorted(each["name"] for each in container_of(documents, deployment)["env"])


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
        ("platform=autopilot,spotLabels.mine=yes", "GKE Autopilot refuses pods that name them"),
    ],
)
def test_a_value_that_would_do_nothing_or_stop_all_is_refused(tools: Path, setting: str, words: str) -> None:
    assert words in refusal(tools, setting)


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
    assert {"name": "health", "containerPort": 8081} in container_of(render(tools))["ports"]


def test_a_chart_of_charts_may_leave_it_out(tools: Path, tmp_path: Path) -> None:
    """`condition: shoal.enabled` of a dependency, where the parent's values say so; they may be `global`, too."""
    (tmp_path / "charts").mkdir()
    (tmp_path / "charts" / "shoal").symlink_to(CHART)
    parent = {"apiVersion": "v2", "name": "platform", "version": "1.0.0", "dependencies": [
        {"name": "shoal", "version": "*", "condition": "shoal.enabled"}]}  # fmt: skip
    (tmp_path / "Chart.yaml").write_text(yaml.safe_dump(parent))
    images = flags(*(f"shoal.{each}" for each in IMAGES_SET))
    for enabled in (True, False):
        asked = flags(f"shoal.enabled={str(enabled).lower()},global.team=a")
        documents = template(tools, "p", str(tmp_path), *images, *asked)
        assert bool(of_kind(documents, "Deployment")) == enabled
    assert "schema" in refusal(tools, "enabled=perhaps")


def test_a_scope_that_is_null_is_that_of_all_namespaces(tools: Path) -> None:
    every = ("admissionPolicy.enabled=true", "networkPolicy.enabled=true", "metrics.podMonitor.enabled=true")
    assert render(tools, "scope.namespace=null", *every) == render(tools, *every)
    assert "SHOAL_NAMESPACE" not in environment_of(render(tools)), (
        "the API server drops a value that is empty"
    )
    assert environment_of(render(tools, "scope.namespace=a"))["SHOAL_NAMESPACE"] == "a"
