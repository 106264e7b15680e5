"""kubeconform, strict, on everything that the chart renders and that `examples/` has.

Its schemas are the API server's own OpenAPI, so that nothing is fetched and the versions are those of the tests.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dev.cluster import ControlPlane
from dev.kube import Kube
from dev.paths import ROOT
from dev.tools.build import go_environment
from tests.chart.rendered import CHART, IMAGES_SET, flags, templated

ELSEWHERE = (
    "ServiceMonitor,PodMonitor,PrometheusRule,Application,Kustomization,GitRepository,"
    "ResourceFlavor,ClusterQueue,LocalQueue"
)
"""Kinds of the Prometheus operator, Argo CD, Flux and Kueue, which the API server does not know."""
KUSTOMIZE = {"kustomization.yaml", "references.yaml"}
"""Files that are no objects."""
EVERYTHING = (
    "pools.enabled=true",
    "pools.bufferNamespaces={team}",
    "page.enabled=true",
    "admissionPolicy.enabled=true",
    "networkPolicy.enabled=true",
    "metrics.serviceMonitor.enabled=true",
    "metrics.podMonitor.enabled=true",
    "metrics.rules.enabled=true",
    "metrics.dashboard.enabled=true",
)


def strict(schema: Any) -> Any:
    """A schema as JSON Schema has it: no unknown fields, Kubernetes' two kinds of text that may be a number."""
    if not isinstance(schema, dict):
        return schema
    if schema.get("format") == "int-or-string" or schema.get("x-kubernetes-int-or-string"):
        return {"type": ["string", "integer"]}
    if "$ref" in schema:
        return {"$ref": schema["$ref"].replace("#/definitions/", "_definitions.json#/definitions/")}
    found = {key: schema[key] for key in ("type", "enum", "required", "pattern") if key in schema}
    found |= {key: strict(schema[key]) for key in ("items", "additionalProperties") if key in schema}
    if "properties" in schema:
        found["properties"] = {name: strict(each) for name, each in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            found["additionalProperties"] = False
    return found


def store(openapi: dict[str, Any], folder: Path) -> None:
    """Write a file for each kind, and one with all definitions."""
    definitions = openapi["definitions"]
    known = {name: strict(each) for name, each in definitions.items()}
    known["io.k8s.apimachinery.pkg.api.resource.Quantity"] = {"type": ["string", "number"]}
    (folder / "_definitions.json").write_text(json.dumps({"definitions": known}))
    for name, each in definitions.items():
        for kind in each.get("x-kubernetes-group-version-kind", ()):
            group = kind["group"].partition(".")[0]
            parts = [kind["kind"].lower(), *([group] if group else []), kind["version"]]
            reference = {"$ref": f"_definitions.json#/definitions/{name}"}
            (folder / f"{'-'.join(parts)}.json").write_text(json.dumps(reference))


@pytest.fixture
async def schemas(kube: Kube, crds: None, tmp_path: Path) -> Path:
    store(await kube.get("/openapi/v2"), tmp_path)
    return tmp_path


def kubeconform(schemas: Path, *arguments: str, text: str = "") -> str:
    """What it says of manifests that are wrong; empty if all are valid."""
    location = f"{schemas}/{{{{ .ResourceKind }}}}{{{{ .KindSuffix }}}}.json"
    done = subprocess.run(
        [
            "go",
            "tool",
            "kubeconform",
            "-strict",
            "-skip",
            ELSEWHERE,
            "-schema-location",
            location,
            *arguments,
        ],
        cwd=ROOT / "dev" / "checks",
        env=go_environment(),
        input=text,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout + done.stderr if done.returncode else ""


def rendered(plane: ControlPlane, *values: str) -> str:
    words = ("shoal", str(CHART), "--namespace", "shoal-system", *flags(*IMAGES_SET, *values))
    return templated(plane.tools.folder, *words)


@pytest.mark.nightly
async def test_chart_and_examples_conform_to_the_schemas_of_the_api_server(
    control_plane: ControlPlane, schemas: Path
) -> None:
    scoped = ("scope.namespace=team", "scope.nodes=false", "scope.pools=false")
    files = [each for each in sorted((ROOT / "examples").rglob("*.yaml")) if each.name not in KUSTOMIZE]
    for number, values in enumerate(((), scoped, EVERYTHING)):
        files.append(schemas / f"chart-{number}.yaml")
        files[-1].write_text(rendered(control_plane, *values))
    assert kubeconform(schemas, *map(str, files)) == ""
    wrong = files[-1].read_text().replace("terminationGracePeriodSeconds: 10", "terminationGraceSeconds: 10")
    assert "terminationGraceSeconds" in kubeconform(schemas, text=wrong)
