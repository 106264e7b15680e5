"""Every example in the API group of the CRDs has a CRD and is valid."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from shoal.api.base import API_VERSION, GROUP
from shoal.api.capacity_pool import CapacityPool
from shoal.api.crd import files
from shoal.api.speed_profile import SpeedProfile
from shoal.api.training_job import TrainingJob

EXAMPLES = Path(__file__).parents[3] / "examples"
DOCUMENTS = [
    pytest.param(document, id=f"{path.relative_to(EXAMPLES)}-{number}")
    for path in sorted(EXAMPLES.rglob("*.yaml"))
    for number, document in enumerate(yaml.safe_load_all(path.read_text()))
    if document.get("apiVersion", "").split("/")[0] == GROUP
]


@pytest.fixture(scope="module")
def kinds() -> set[str]:
    return {yaml.safe_load(text)["spec"]["names"]["kind"] for text in files().values()}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_example_has_crd_and_is_valid(document: dict[str, Any], kinds: set[str]) -> None:
    assert document["apiVersion"] == API_VERSION
    assert document["kind"] in kinds
    models = {model.__name__: model for model in (CapacityPool, SpeedProfile, TrainingJob)}
    models[document["kind"]].model_validate(document)
