"""The chart as rendered by `helm`, and how to find one's way in it."""

import re
import subprocess
from collections.abc import Hashable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, cast

import yaml

from dev.paths import ROOT

CHART = ROOT / "charts" / "shoal"
IMAGES_SET = (
    "image.repository=r.io/operator",
    "trainer.psImage=r.io/ps:1",
    "trainer.workerImage=r.io/worker:1",
)


def helm(tools: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(tools / "helm"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@cache
def templated(tools: Path, *arguments: str) -> str:
    """What `helm template` says; many tests look at the same release."""
    done = helm(tools, "template", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def template(tools: Path, *arguments: str) -> list[dict[str, Any]]:
    return parsed(templated(tools, *arguments))


def flags(*values: str) -> list[str]:
    return [flag for value in values for flag in ("--set", value)]


def render(
    tools: Path, *sets: str, namespace: str = "shoal-system", crds: bool = False
) -> list[dict[str, Any]]:
    """The objects of a release. Its CRDs only where they are asked for: they take three times as long as the rest."""
    values = flags(*IMAGES_SET, *sets, *(() if crds else ("crds.install=false",)))
    return template(tools, "shoal", str(CHART), "--namespace", namespace, *values)


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


def pod_of(documents: list[dict[str, Any]], name: str = "") -> dict[str, Any]:
    """The pods of the Deployment with this name, or of the only one."""
    [found] = [d for d in of_kind(documents, "Deployment") if name in {"", d["metadata"]["name"]}]
    return cast("dict[str, Any]", found["spec"]["template"]["spec"])


def container_of(documents: list[dict[str, Any]], name: str = "") -> dict[str, Any]:
    [container] = pod_of(documents, name)["containers"]
    return cast("dict[str, Any]", container)


def environment_of(documents: list[dict[str, Any]], name: str = "") -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in container_of(documents, name)["env"]}


def ports_of(documents: list[dict[str, Any]]) -> set[str]:
    return {each["name"] for each in container_of(documents)["ports"]}


def granted(documents: list[dict[str, Any]], kind: str) -> set[tuple[str, str]]:
    return {
        (resource, verb)
        for role in of_kind(documents, kind)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def refusal(tools: Path, *words: str) -> str:
    """What `helm template` says instead of rendering; `words`: values, or options."""
    values = flags(*IMAGES_SET, *(word for word in words if word[0] != "-"))
    options = (word for word in words if word[0] == "-")
    done = helm(tools, "template", "shoal", str(CHART), "--namespace", "team-a", *values, *options)
    assert done.returncode != 0
    return done.stderr


def names_of(documents: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    return {(d["kind"], d["metadata"].get("namespace", ""), d["metadata"]["name"]) for d in documents}


LABEL = re.compile("([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
"""What Kubernetes takes as the value of a label."""


MONITORING = "serviceMonitor", "podMonitor", "rules", "dashboard"


EVERYTHING = (
    *(f"{each}.enabled=true" for each in ("pools", "page", "networkPolicy", "admissionPolicy")),
    *(f"metrics.{each}.enabled=true" for each in MONITORING),
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
