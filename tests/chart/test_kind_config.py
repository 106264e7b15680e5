"""kind-config.yaml as kind's own types read it, and the nodes as the operator sees them. No Docker engine is needed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.demo.kind import CONFIG, audited
from dev.paths import ROOT
from dev.tools.build import go_environment
from shoal.api.labels import SPOT_LABELS

pytestmark = pytest.mark.nightly
"""kind's types are compiled for it."""


def as_kind_reads(config: Path) -> list[dict[str, Any]]:
    """One dict for each node. Raises CalledProcessError if kind would refuse the file."""
    done = subprocess.run(
        ["go", "run", ".", str(config)],
        cwd=ROOT / "dev" / "kindcheck",
        env=go_environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_spot(labels: dict[str, str] | None) -> bool:
    return any((labels or {}).get(key) in values for key, values in SPOT_LABELS.items())


def test_one_on_demand_and_three_spot_nodes() -> None:
    nodes = as_kind_reads(CONFIG)
    assert [node["role"] for node in nodes] == ["control-plane", "worker", "worker", "worker", "worker"]
    assert [is_spot(node["labels"]) for node in nodes] == [False, False, True, True, True]
    assert all(node["mounts"] == 0 for node in nodes), "the file must be usable alone"


def test_the_demo_adds_only_an_audit_log(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(yaml.safe_dump(audited(yaml.safe_load(CONFIG.read_text()), tmp_path)))
    with_log, plain = as_kind_reads(config), as_kind_reads(CONFIG)
    assert with_log[0].pop("mounts") == 2
    assert plain[0].pop("mounts") == 0
    assert with_log == plain


def test_an_unknown_field_is_refused(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(CONFIG.read_text().replace("labels: {", "label: {"))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        as_kind_reads(config)
    assert "field label not found" in refused.value.stderr
