"""Chaos on a real control plane: whatever API server, network, nodes and users do, nothing is lost or doubled."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.fake_kubelet import FakeKubelet
from dev.kube import Kube
from tests.control_plane.storm import Storm

SEEDS = int(os.environ.get("SHOAL_CHAOS_REAL", "3"))
FIRST = int(os.environ.get("SHOAL_CHAOS_FIRST", "0"))
SHORT = {"kill": 1, "watches": 2, "lose": 1, "crash": 1, "edit_once": 1, "doom": 1}
LONG = {
    "kill": 3,
    "pause": 2,
    "watches": 6,
    "outage": 2,
    "long_outage": 1,
    "lose": 3,
    "crash": 2,
    "blip": 1,
    "all_unknown": 1,
    "edit_once": 5,
    "replace": 1,
    "forbid": 1,
    "doom": 1,
}


pytestmark = pytest.mark.flaky(reruns=0)  # what chance finds once is found


async def test_a_short_storm_leaves_the_world_as_specified(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, second_namespace: str,
    fake_kubelet: FakeKubelet, tmp_path: Path,
) -> None:  # fmt: skip
    storm = Storm(control_plane, kube, fake_kubelet, namespace, second_namespace, tmp_path, 1)
    async with storm.brewing():
        await storm.rage(SHORT, (0.1, 0.6), share=0.1)
        await storm.clear()
        await storm.as_specified(quiet_seconds=3.0)
    assert len(storm.weather.met) >= 3, storm.weather.met


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
async def test_whatever_happens_nothing_is_lost_doubled_or_left(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, second_namespace: str,
    fake_kubelet: FakeKubelet, tmp_path: Path, seed: int,
) -> None:  # fmt: skip
    storm = Storm(control_plane, kube, fake_kubelet, namespace, second_namespace, tmp_path, seed)
    async with storm.brewing():
        await storm.rage(LONG, (0.3, 3.0), share=0.08)
        await storm.clear()
        await storm.as_specified()
    assert len(storm.weather.met) >= 10, storm.weather.met
