"""The checked-in CRDs and reference match the models, and the models read what the CRD allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from shoal.api.crd import files, structural
from shoal.api.reference import reference
from shoal.api.training_job import RunPolicy, TrainingJob

ROOT = Path(__file__).parents[3]
HINT = (
    "run: python -m shoal.api.crd crds charts/shoal/files/crds && python -m shoal.api.reference docs/api.md"
)


@pytest.mark.parametrize("folder", ["crds", "charts/shoal/files/crds"])
def test_checked_in_crds_match_the_models(folder: str) -> None:
    for name, content in files().items():
        assert (ROOT / folder / name).read_text() == content, HINT


def test_checked_in_reference_matches_the_models() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == reference(), HINT


def test_reference_describes_the_pod_template_once() -> None:
    text = reference()
    assert text.count("### Pod templates") == text.count("`restartPolicy`") == 1
    assert "template.spec" not in text


def test_schema_is_structural() -> None:
    """Nothing that the API server rejects in a CRD or silently misinterprets."""

    def walk(part: Any, path: str) -> None:
        if isinstance(part, list):
            for number, each in enumerate(part):
                walk(each, f"{path}[{number}]")
        if not isinstance(part, dict):
            assert part is not None, f"null at {path}"
            return
        refused = {"$ref", "$defs", "const", "examples", "discriminator", "uniqueItems"} & part.keys()
        assert not refused, f"{refused} at {path}"
        assert part.get("additionalProperties", True) is not False, path
        for name, each in part.items():
            walk(each, f"{path}.{name}")

    walk(structural(TrainingJob), "")


def test_only_templates_keep_unknown_fields() -> None:
    text = next(iter(files().values()))
    kept = text.count("x-kubernetes-preserve-unknown-fields: true")
    assert kept == 10  # spec, containers, their env and resources, of the two templates


def test_schema_has_no_floats() -> None:
    assert "type: number" not in next(iter(files().values()))


def test_integers_of_the_spec_are_bounded_and_stored_ones_clamped() -> None:
    def integers(part: Any, path: str) -> Iterator[str]:
        if isinstance(part, dict):
            if part.get("type") == "integer" and "maximum" not in part:
                yield path
            for name, each in part.items():
                if not part.get("x-kubernetes-int-or-string") or name == "properties":
                    yield from integers(each, f"{path}.{name}")

    assert list(integers(structural(TrainingJob)["properties"]["spec"], "")) == []
    policy = RunPolicy.model_validate({"activeDeadlineSeconds": 2**63 - 1, "progressDeadlineSeconds": 10**12})
    assert policy.active_deadline_seconds == policy.progress_deadline_seconds == 2**31 - 1


def test_unknown_field_of_the_spec_is_rejected() -> None:
    manifest = {
        "metadata": {"name": "x"},
        "spec": {
            "storage": {"ephemeral": {}},
            "training": {"entrypoint": "a:b", "stopAfter": {"epochs": 1}},
            "workers": {"replicas": 1, "replica": 2},
        },
    }
    with pytest.raises(ValidationError, match=r"workers\.replica"):
        TrainingJob.model_validate(manifest)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda p: p.name)
def test_examples_parse(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document and document["kind"] == "TrainingJob":
            assert TrainingJob.model_validate(document).spec.training.entrypoint
