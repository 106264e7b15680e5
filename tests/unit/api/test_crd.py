"""The CRD that is checked in is the one that the models make, and what it holds the models can read."""

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
def test_what_is_checked_in_is_what_is_generated(folder: str) -> None:
    for name, content in files().items():
        assert (ROOT / folder / name).read_text() == content, HINT


def test_the_reference_is_what_is_generated() -> None:
    assert (ROOT / "docs" / "api.md").read_text() == reference(), HINT


def test_reference_describes_the_pod_template_once() -> None:
    text = reference()
    assert text.count("### Pod templates") == text.count("`restartPolicy`") == 1
    assert "template.spec" not in text


def test_the_schema_is_structural() -> None:
    """What the API server refuses in a CRD (or quietly misreads) is not there."""

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
    assert kept == 4  # spec and containers of the two templates


def test_no_floats_in_the_api() -> None:
    assert "type: number" not in next(iter(files().values()))


def test_every_whole_number_of_the_spec_is_bounded_and_one_stored_before_is_read_at_the_bound() -> None:
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


def test_an_unknown_field_is_an_error_for_the_models_too() -> None:
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
def test_the_examples_parse(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document and document["kind"] == "TrainingJob":
            assert TrainingJob.model_validate(document).spec.training.entrypoint
