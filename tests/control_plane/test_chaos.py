"""Chaos on a real control plane: whatever API server, network, nodes and users do, nothing is lost or doubled."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.kube import Kube
from tests.control_plane.storm import BY_DAY, HEAVY, LIGHT, REPLICAS, Storm
from tests.doubles.fake_kubelet import FakeKubelet
from tests.every_field import BASE

FIRST = int(os.environ.get("SHOAL_CHAOS_FIRST", "0"))
SHORT_BY_DAY = 10
SHORT_STORMS = int(os.environ.get("SHOAL_CHAOS_SHORT", str(SHORT_BY_DAY)))
LONG_STORMS = int(os.environ.get("SHOAL_CHAOS_REAL", "3"))
OFTEN = ("kill", "stop", "watches", "lose", "crash", "lose_server", "edit_once", "replace",
         "outage", "pause", "partition", "forbid", "doom")  # fmt: skip
"""In the short storms. What happens to nodes has an aftermath, in which nothing else is certain, so it comes last."""
RARELY = {7: ["long_outage"], 8: ["reclaim"], 9: ["all_unknown", "blip"]}
"""Beside these, in the last storms of each ten."""
STEPS = 4
TEN = 10
LONG = {
    "kill": 3,
    "stop": 1,
    "pause": 2,
    "partition": 1,
    "watches": 6,
    "outage": 2,
    "long_outage": 1,
    "lose": 3,
    "crash": 2,
    "lose_server": 1,
    "blip": 1,
    "reclaim": 1,
    "all_unknown": 1,
    "edit_once": 5,
    "replace": 1,
    "forbid": 1,
    "doom": 1,
}


def is_heavy(seed: int) -> bool:
    """Whether its storm is longer than a Lease and the patience with nodes."""
    return seed >= SHORT_BY_DAY and seed % 30 == 9


def dealt(seed: int) -> list[str]:
    """The steps of a short storm: cards of a deck, so that each ten storms have all of them, whatever chance does."""
    ten, place = divmod(seed, TEN)
    chance = random.Random(ten)
    deck = [card for _ in range(TEN * STEPS // len(OFTEN) + 1) for card in chance.sample(OFTEN, len(OFTEN))]
    steps = [*deck[place * STEPS :][:STEPS], *RARELY.get(place, ())]
    if place == 6:  # else the leader changes only when it is stopped cleanly
        steps.append("takeover")
    if seed % 20 == 19:
        steps.append("minute_outage")
    if is_heavy(seed):  # what costs a leader its Lease
        steps += ["pause", "partition", "forbid"]
    return steps


pytestmark = pytest.mark.flaky(reruns=0)  # what chance finds once is found


@pytest.mark.timeout(300 + 40 * SHORT_STORMS)
async def test_each_of_many_short_storms_leaves_the_world_as_specified(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet, tmp_path: Path,
) -> None:  # fmt: skip
    assert SHORT_STORMS, "no storm is asked for"
    storm = Storm(control_plane, kube, fake_kubelet, namespace, tmp_path)
    async with storm.brewing():
        for seed in range(FIRST, FIRST + SHORT_STORMS):
            heavy = is_heavy(seed)
            force = HEAVY if heavy else LIGHT if seed >= SHORT_BY_DAY else BY_DAY
            await storm.rage(seed, ["watches", *dealt(seed)], force)
            await storm.clear()
            await storm.as_specified(quiet_seconds=3.0 if heavy else 0.5)
        await storm.as_specified(quiet_seconds=3.0)
        await storm.doomed_are_gone()
    if SHORT_STORMS >= SHORT_BY_DAY:
        assert not (unmet := storm.weather.unmet()), unmet
        dealt_to_them = {step for seed in range(FIRST, FIRST + SHORT_STORMS) for step in dealt(seed)}
        assert not (idle := dealt_to_them - storm.happened.keys()), idle
        expected = storm.expected
        losses = expected.sure - expected.failures, expected.failures, expected.servers
        assert min(losses) >= 1, expected
        assert sum(losses) >= SHORT_STORMS // 3, expected
        assert storm.witness.holders == set(REPLICAS)
        assert storm.witness.takeovers >= SHORT_STORMS // 10


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(FIRST, FIRST + LONG_STORMS))
async def test_whatever_happens_nothing_is_lost_doubled_or_left(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet, tmp_path: Path,
    seed: int,
) -> None:  # fmt: skip
    storm = Storm(control_plane, kube, fake_kubelet, namespace, tmp_path)
    async with storm.brewing():
        await storm.rage(seed, [what for what, times in LONG.items() for _ in range(times)], HEAVY)
        await storm.clear()
        await storm.as_specified()
        await storm.doomed_are_gone()
    assert storm.expected.sure + storm.expected.servers >= 1, storm.expected
    assert len(storm.weather.met) >= 10, storm.weather.met


@pytest.mark.nightly
@pytest.mark.parametrize("which", [0, 1], ids=["one", "the other"])
async def test_edit_that_a_watch_drops_for_good_is_acted_on(
    control_plane: ControlPlane, crds: None, kube: Kube, namespace: str, fake_kubelet: FakeKubelet, tmp_path: Path,
    which: int,
) -> None:  # fmt: skip
    """There are two of jobs. Of pods there is one: no API server drops an event and goes on."""
    storm = Storm(control_plane, kube, fake_kubelet, namespace, tmp_path)
    async with storm.brewing():
        await storm.as_specified(quiet_seconds=3.0)
        watches = storm.api.watches(storm.witness.leader, "trainingjobs")
        assert len(watches) == 2
        watches[which].drops = b'"generation":2'
        await storm.edit({**BASE, "workers": {**BASE["workers"], "replicas": 5}})
        await storm.edited.runs(5)
        assert storm.weather.met["event dropped"] == 1
