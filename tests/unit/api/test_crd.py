"""The checked-in CRDs and reference match the models, and the models read what the CRD allows."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from shoal.api.base import Resource
from shoal.api.capacity_pool import CapacityPool
from shoal.api.crd import KINDS, custom_resource_definition, files, structural
from shoal.api.elasticity import Objective
from shoal.api.reference import reference
from shoal.api.rules import AS_WRITTEN
from shoal.api.training_job import MAX_ARGS_BYTES, RunPolicy, StopAfter, TrainingJob, TrainingSpec

ROOT = Path(__file__).parents[3]


def test_reference_describes_the_pod_template_once() -> None:
    text = reference()
    assert text.count("### Pod templates") == text.count("`restartPolicy`") == 1
    assert "template.spec" not in text


@pytest.mark.parametrize("kind", KINDS)
def test_schema_is_structural(kind: type[Resource]) -> None:
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

    walk(structural(kind), "")


def test_only_templates_arguments_and_numbers_keep_unknown_fields() -> None:
    text = next(iter(files().values()))
    kept = text.count("x-kubernetes-preserve-unknown-fields: true")
    # Of the two templates: spec, containers, their env and resources, init containers and theirs, volumes and emptyDir;
    # envFrom, ports, mounts, tolerations; affinity, of nodes (required, its terms with expressions and fields,
    # preferred) and twice of pods (required, preferred).
    # The arguments; and maxCost, confidence and value, which may be in quotes.
    assert kept == 2 * (8 + 4 + 7 + 2 * 3) + 1 + 3


def test_arguments_fit_into_an_environment_variable() -> None:
    spec = {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}}
    args = {"rate": 0.1, "layers": [64, 32], "augment": True, "text": "x" * (MAX_ARGS_BYTES - 100)}
    assert TrainingSpec.model_validate({**spec, "args": args}).args.read() == args
    with pytest.raises(ValidationError, match=r"the arguments have 6.* bytes, at most 65536 are possible"):
        TrainingSpec.model_validate({**spec, "args": {**args, "more": "x" * 100}})


def test_a_status_has_no_floats() -> None:
    """Its decimals are strings with as many digits as were chosen; the numbers of a spec are written by people."""
    for kind in KINDS:
        [version] = custom_resource_definition(kind)["spec"]["versions"]
        properties = version["schema"]["openAPIV3Schema"]["properties"]
        assert "number" not in re.findall(r"'type': '([a-z]+)'", str(properties.get("status")))


def test_numbers_in_quotes_are_read() -> None:
    meta = {"name": "a"}
    spec = {
        "limits": {"nodes": 1},
        "price": {"perHour": "0.28"},
        "cores": "0.5",
        "interruptionsPerHour": "0.05",
    }
    read = CapacityPool.model_validate({"metadata": meta, "spec": spec}).spec
    assert read.price is not None
    assert (read.price.per_hour, read.cores, read.interruptions_per_hour) == (0.28, 0.5, 0.05)
    with pytest.raises(ValidationError, match="finite number"):
        CapacityPool.model_validate({"metadata": meta, "spec": {**spec, "cores": "1e999"}})


@pytest.mark.parametrize(
    ("said", "taken"), [(0.5, True), ("0.6", True), (".95", True), ("0.999", True), (0.4, False), (1, False),
                        ("1", False), ("0.49", False), ("0.9991", False), ("95%", False)]
)  # fmt: skip
def test_a_confidence_that_cannot_be_promised_is_refused_with_what_can(
    said: float | str, taken: bool
) -> None:
    objective = structural(TrainingJob)["properties"]["spec"]["properties"]["elasticity"]["properties"][
        "objective"
    ]
    schema = objective["properties"]["confidence"]
    if isinstance(said, str):  # as the API server
        assert (re.search(schema["pattern"], said) is not None) == taken
    else:
        assert (schema["minimum"] <= said <= schema["maximum"]) == taken
    if taken:
        assert Objective.model_validate({"confidence": said}).confidence == float(said)
    else:
        with pytest.raises(ValidationError, match=r"equal to 0\.5|equal to 0\.999|valid number"):
            Objective.model_validate({"confidence": said})


@pytest.mark.parametrize(
    ("said", "taken"), [(0, True), (0.05, True), ("0.05", True), (".5", True), ("5e-2", True), (1000, True),
                        ("1000", True), ("999.9", True), (1000.5, False), (1e300, False), ("1001", False),
                        ("1e99", False), ("-1", False), ("", False)]
)  # fmt: skip
def test_a_rate_that_no_node_can_have_is_refused(said: float | str, taken: bool) -> None:
    """With 1e300 an hour in one pool, a job that named it got no plan."""
    spec = structural(CapacityPool)["properties"]["spec"]["properties"]
    schema = spec["interruptionsPerHour"]
    if isinstance(said, str):  # as the API server
        assert (re.search(schema["pattern"], said) is not None) == taken
    else:
        assert (schema["minimum"] <= said <= schema["maximum"]) == taken
    body = {"metadata": {"name": "a"}, "spec": {"limits": {"nodes": 1}, "interruptionsPerHour": said}}
    if taken:
        read = CapacityPool.model_validate(body, context=AS_WRITTEN)
        assert read.spec.interruptions_per_hour == float(said)
    else:
        with pytest.raises(ValidationError, match="interruptionsPerHour"):
            CapacityPool.model_validate(body, context=AS_WRITTEN)


@pytest.mark.parametrize("said", [1000.5, 1e300, 10**30, "1001", "1e99"])
def test_a_stored_rate_beyond_the_bound_is_clamped(said: float | str) -> None:
    body = {"metadata": {"name": "a"}, "spec": {"limits": {"nodes": 1}, "interruptionsPerHour": said}}
    assert CapacityPool.model_validate(body).spec.interruptions_per_hour == 1000


def test_refused_edit_says_how_a_mended_job_is_applied_again() -> None:
    """Who had mended a script read of `initialFrom` only, and that did not help."""
    schema = json.dumps(custom_resource_definition(TrainingJob))
    said = dict(re.findall(r'"(\w+) is immutable: ([^"]+)"', schema))
    assert {"code", "entrypoint", "args", "uri"} <= said.keys()
    for words in said.values():
        assert "delete the job" in words


def test_each_kind_is_described_by_its_model_alone() -> None:
    """`scale` only where the model has it, `spec` required only where it is, a status subresource for each status."""
    crds = {kind.__name__: custom_resource_definition(kind)["spec"] for kind in KINDS}
    versions = {name: spec["versions"][0] for name, spec in crds.items()}
    assert {name for name, version in versions.items() if "scale" in version["subresources"]} == {
        "TrainingJob"
    }
    assert all("status" in version["subresources"] for version in versions.values())
    required = {name: v["schema"]["openAPIV3Schema"].get("required") for name, v in versions.items()}
    assert required == {"TrainingJob": ["spec"], "CapacityPool": ["spec"], "SpeedProfile": None}
    assert {name: spec["scope"] for name, spec in crds.items()} == {
        "TrainingJob": "Namespaced",
        "CapacityPool": "Cluster",
        "SpeedProfile": "Namespaced",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_columns_and_scale_read_fields_that_exist(kind: type[Resource]) -> None:
    """A column whose path has a typing error shows nothing, without any error."""
    schema = structural(kind)
    scale = (
        [kind.SCALE.spec_replicas, kind.SCALE.status_replicas, kind.SCALE.label_selector]
        if kind.SCALE
        else []
    )
    for path in [*(column.path for column in kind.COLUMNS), *scale]:
        at = schema
        if path.startswith(".metadata"):
            continue
        for part in path.split("[")[0].strip(".").split("."):
            at = at["properties"][part]


@pytest.mark.parametrize("kind", KINDS)
def test_integers_of_the_spec_are_bounded(kind: type[Resource]) -> None:
    def integers(part: Any, path: str) -> Iterator[str]:
        if isinstance(part, dict):
            if part.get("type") == "integer" and "maximum" not in part:
                yield path
            for name, each in part.items():
                if not part.get("x-kubernetes-int-or-string") or name == "properties":
                    yield from integers(each, f"{path}.{name}")

    assert list(integers(structural(kind)["properties"]["spec"], "")) == []


def test_stored_integers_beyond_the_bound_are_clamped() -> None:
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


@pytest.mark.parametrize(
    ("stop", "said"),
    [
        ({"metric": "accuracy"}, "metric and value must be set together"),
        ({"epochs": 1, "value": "0.9"}, "metric and value must be set together"),
        ({"metric": "val_accuracy", "value": 1.5}, "this metric is at most 1 and never rises to value"),
        ({"metric": "accuracy", "value": "2"}, "this metric is at most 1 and never rises to value"),
    ],
)
def test_a_target_that_is_none_is_refused_with_what_to_change(stop: dict[str, Any], said: str) -> None:
    """By the command line, and by the operator: the API server compares no number that may be in quotes."""
    with pytest.raises(ValidationError, match=said):
        StopAfter.model_validate(stop)


def test_a_metric_of_ones_own_may_exceed_one() -> None:
    assert StopAfter.model_validate({"metric": "accuracy", "value": 1.5, "mode": "Max"}).value == 1.5
