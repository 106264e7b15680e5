"""The manifests of examples/ are taken by a real API server, with every field known."""

from __future__ import annotations

import pytest

from dev.cluster import ControlPlane
from dev.paths import ROOT


@pytest.mark.parametrize(
    "words",
    [
        ("-k", "examples/pools"),
        ("-k", "examples/quickstart"),
        ("-f", "examples/digits.yaml"),
        ("-f", "examples/kueue/job.yaml"),
        ("-f", "examples/node-pools.yaml"),
        ("-f", "examples/pools.yaml"),
        ("-f", "examples/pools/eks.yaml"),
        ("-f", "examples/priorities.yaml"),
        ("-f", "examples/s3/job.yaml"),
    ],
)
def test_manifest_is_admitted(control_plane: ControlPlane, crds: None, words: tuple[str, str]) -> None:
    flag, path = words
    control_plane.kubectl("apply", "--dry-run=server", "--validate=strict", flag, str(ROOT / path))
