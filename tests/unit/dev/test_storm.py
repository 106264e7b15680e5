"""The end of a storm on a real control plane: which counters and pods agree with what was done, and which do not."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from dev.cluster import ControlPlane
from dev.kube import Json, Kube
from tests.control_plane.storm import Expected, Storm
from tests.control_plane.test_chaos import OFTEN, TEN, dealt
from tests.doubles.fake_kubelet import FakeKubelet
from tests.doubles.faulty_api import Fault, Trouble, Weather
from tests.unit.dev.test_witness import Scene


@pytest.fixture
def storm(tmp_path: Path) -> Storm:
    made = Storm(
        ControlPlane.__new__(ControlPlane), Kube.__new__(Kube), FakeKubelet.__new__(FakeKubelet), "", tmp_path
    )
    made.witness = Scene(tmp_path).witness
    return made


def counted(failures: int, disruptions: int) -> Json:
    return {"failures": failures, "disruptions": disruptions}


THREE = Expected(sure=3, failures=1, servers=1)


@pytest.mark.parametrize(
    ("expected", "restarts", "servers"),
    [
        (THREE, counted(1, 2), 1),
        (Expected(sure=3, failures=1, servers=1, perhaps={"a", "b"}), counted(0, 5), 3),
        (Expected(sure=3, failures=1, servers=1, kept={"a", "b"}), counted(0, 3), 1),
    ],
    ids=["exact", "perhaps", "failed on a silent node"],
)
def test_what_agrees(storm: Storm, expected: Expected, restarts: Json, servers: int) -> None:
    storm.expected = expected
    storm._compare(restarts, servers)


@pytest.mark.parametrize(
    ("expected", "restarts", "servers"),
    [
        (THREE, counted(1, 1), 1),
        (THREE, counted(1, 3), 1),
        (THREE, counted(2, 1), 1),
        (THREE, counted(0, 3), 1),
        (THREE, counted(1, 2), 0),
        (THREE, counted(1, 2), 2),
        (Expected(sure=3, failures=1, servers=1, kept={"a", "b"}), counted(1, 3), 1),
    ],
    ids=["missed", "twice", "failure", "no failure", "server missed", "server twice", "all silent"],
)
def test_what_does_not_agree(storm: Storm, expected: Expected, restarts: Json, servers: int) -> None:
    storm.expected = expected
    with pytest.raises(AssertionError):
        storm._compare(restarts, servers)


def test_a_pod_that_is_replaced_because_all_nodes_were_silent(storm: Storm) -> None:
    storm.witness.pods["there"] = {}
    storm.expected = Expected(
        kept={"there", "deleted", "blipped", "gone"}, taken={"deleted"}, perhaps={"blipped"}
    )
    assert storm._replaced_for_silence() == ["gone was replaced because all nodes were silent"]


@pytest.mark.parametrize("first", [0, 70, 190])
def test_each_ten_storms_have_every_step(first: int) -> None:
    steps = {step for seed in range(first, first + TEN) for step in dealt(seed)}
    assert steps >= {*OFTEN, "takeover", "long_outage", "reclaim", "all_unknown", "blip"}


def test_faults_are_dealt() -> None:
    """Chance alone forgot four of them in the storms of a day."""
    weather = Weather(random.Random(7), share=1.0)
    for method in ("GET", "POST", "PATCH") * len(Fault):
        fault = weather.strikes(method, watch=False)
        assert fault is not None
        weather.meet(fault)
    assert weather.unmet() == [f"trouble {each}" for each in Trouble]
    assert weather.rarest([Fault.LATE, Trouble.DEAF]) is Trouble.DEAF
