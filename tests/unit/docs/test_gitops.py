"""examples/gitops has what a controller needs to begin: the namespace, and for Flux the repository."""

from __future__ import annotations

import yaml

from tests.unit.docs.pages import read

NAMESPACE = yaml.safe_load(read("examples/gitops/kustomization.yaml"))["namespace"]


def test_flux_finds_the_repository_and_the_namespace() -> None:
    """It makes no namespace: a Kustomization whose objects are for one that is missing fails for ever."""
    objects = {each["kind"]: each for each in yaml.safe_load_all(read("examples/gitops/flux.yaml"))}
    assert objects["Namespace"]["metadata"] == {"name": NAMESPACE}
    source = objects["Kustomization"]["spec"]["sourceRef"]
    there = objects[source["kind"]]["metadata"]
    assert there == {"name": source["name"], "namespace": objects["Kustomization"]["metadata"]["namespace"]}


def test_argo_cd_makes_the_namespace() -> None:
    spec = yaml.safe_load(read("examples/gitops/argocd.yaml"))["spec"]
    assert spec["destination"]["namespace"] == NAMESPACE
    assert "CreateNamespace=true" in spec["syncPolicy"]["syncOptions"]
