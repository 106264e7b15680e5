"""Names and labels: of each release its own, and such as Kubernetes takes."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.chart.rendered import (
    CHART,
    EVERYTHING,
    IMAGES_SET,
    LABEL,
    MONITORING,
    flags,
    helm,
    labels_in,
    names_of,
    of_kind,
    pod_of,
    render,
    template,
)
from tests.unit.policy.test_placement import AUTOPILOT_KEYS


def test_own_labels_come_before_those_that_all_have(tools: Path) -> None:
    """And no key is there twice, which `parsed` sees."""
    sets = [f"metrics.{part}.{what}" for part in MONITORING for what in ("enabled=true", "labels.team=b")]
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
    documents = render(tools, "platform=autopilot", "pools.enabled=true")
    keys = {
        expression["key"]
        for each in of_kind(documents, "Deployment")
        for term in pod_of([each])["affinity"]["nodeAffinity"][
            "preferredDuringSchedulingIgnoredDuringExecution"
        ]
        for expression in term["preference"]["matchExpressions"]
    }
    assert keys
    selected = {key for each in of_kind(documents, "Deployment") for key in pod_of([each])["nodeSelector"]}
    assert keys | selected <= AUTOPILOT_KEYS


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

    documents = template(tools, release, str(CHART), "-n", "456", "--set-string", f"scope.namespace={scope}",
                *flags("crds.install=false,metrics.serviceMonitor.enabled=true", *IMAGES_SET))  # fmt: skip
    assert [each for each in strings(documents) if not isinstance(each, str | dict)] == []
    assert all(re.fullmatch("[a-z][-a-z0-9]*", d["metadata"]["name"]) for d in of_kind(documents, "Service"))


def test_the_full_name_is_that_of_all_objects(tools: Path) -> None:
    """As other charts call it; it has no release before it."""
    named = names_of(render(tools, "fullnameOverride=fish", "nameOverride=other"))
    assert named == names_of(render(tools, "nameOverride=fish"))


def test_every_object_has_the_common_labels(tools: Path) -> None:
    documents = render(tools, "commonLabels.team=ml", *EVERYTHING, crds=True)
    bare = {d["kind"] for d in documents if d["metadata"].get("labels", {}).get("team") != "ml"}
    assert bare <= {"CustomResourceDefinition"}
    for deployment in of_kind(documents, "Deployment"):
        assert deployment["spec"]["template"]["metadata"]["labels"]["team"] == "ml"
        assert "team" not in deployment["spec"]["selector"]["matchLabels"], "selectors are immutable"


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
    documents = template(tools, "shoal", str(archive), *flags(*IMAGES_SET, *EVERYTHING))
    labels = [label for document in documents for label in labels_in(document.get("metadata", {}))]
    assert any(name == "helm.sh/chart" for name, _ in labels)
    assert [(name, value) for name, value in labels if not LABEL.fullmatch(value)] == []
    pods = [each["spec"]["template"]["metadata"]["labels"] for each in of_kind(documents, "Deployment")]
    assert not any("helm.sh/chart" in each for each in pods), "every commit would restart the replicas"


RELEASES = st.from_regex(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", fullmatch=True)


@settings(max_examples=5, deadline=None)
@given(RELEASES.filter(lambda name: len(name) <= 53))
@example("a" * 53)
@example("1" * 44 + "----" + "b" * 5)
@example("a" * 48 + "--b")
def test_every_release_has_names_that_kubernetes_takes(tools: Path, release: str) -> None:
    """A Service's name has at most 63 characters, and Helm's name of a release 53."""
    documents = template(tools, release, str(CHART), *flags(*IMAGES_SET, *EVERYTHING, "crds.install=false"))
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
