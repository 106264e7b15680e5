"""The operator's benchmark, as far as it needs no cluster: its figures, and what its page says."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from benchmarks.harness import Measurement
from benchmarks.operator import page, planning, traced
from benchmarks.operator.bare import objects
from benchmarks.operator.traced import Moment
from benchmarks.operator.world import rate
from dev.audit import Write

START = datetime(2026, 1, 1, tzinfo=UTC)
ROWS = [
    Measurement("many jobs: objects a second, ratio", 0.8, "x", "a bare client", 0.7),
    Measurement("many jobs: CPU of the operator for each object", 2.0, "ms", ""),
    Measurement("many jobs: CPU of kube-apiserver for each object", 6.0, "ms", ""),
    Measurement("loop held, ratio", 3.0, "x", "json.loads of the job's pods"),
]


def test_page_says_where_the_time_goes() -> None:
    said = page.text(ROWS)
    assert "takes 8 ms of processor time in all: kube-apiserver 6 ms, the operator 2 ms" in said
    assert "The operator's own part is 25%, and one process of it could make 500 objects a second" in said
    assert "Where the time goes" not in page.text(ROWS[:1])


def test_plot_is_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "PLOT", tmp_path / "build" / "operator.png")
    page.draw(ROWS)
    assert page.PLOT.read_bytes().startswith(b"\x89PNG")


def test_bare_client_makes_what_the_operator_makes_of_a_job() -> None:
    made = list(objects("team", "job-1", 4))
    assert sorted(kind for kind, _ in made) == ["poddisruptionbudgets", *["pods"] * 5, "secrets", "services"]
    assert not any("ownerReferences" in body["metadata"] for _, body in made)  # the owner does not exist


def test_bare_client_makes_all_pods_of_a_large_job() -> None:
    """The operator begins them in several plans."""
    made = [body["metadata"]["name"] for kind, body in objects("team", "job-1", 600) if kind == "pods"]
    assert sorted(made) == sorted(["job-1-ps-0-0", *(f"job-1-worker-{index}-0" for index in range(600))])


def test_rate_is_from_the_first_request_to_the_last_answer() -> None:
    made = []
    for number in range(4):
        at = START + timedelta(seconds=number)
        write = Write(
            *("create", "pods", "", "ns", f"pod-{number}", "user", "agent", 201, ""),
            received=at,
            answered=at + timedelta(seconds=1),
        )
        made.append(write)
    assert rate(made) == pytest.approx(1.0)


def test_one_change_of_a_job_is_measured() -> None:
    rows = {row.name: row for row in planning.measure(quick=True)}
    assert rows["loop held by one change of 100 workers"].value > 0
    assert 1 < rows["status of 100 workers"].value < 20
    assert rows["loop held by one look at one of ten pools of 100 jobs on 500 nodes"].value > 0


def test_time_of_a_replacement_is_told_in_parts(tmp_path: Path) -> None:
    file = tmp_path / "trace"
    began = START.timestamp()
    told = (
        Moment(began + 0.010, traced.SEEN, "one-worker-3-0"),
        Moment(began + 0.013, traced.TAKEN, "one-worker-3-1"),
        Moment(began + 0.015, traced.PLANNED, "one-worker-3-1"),
        Moment(began + 0.016, traced.ASKED, "one-worker-3-1"),
        Moment(began + 0.030, traced.SEEN, "one-worker-3-0"),  # its last event
        Moment(began + 0.066, traced.PLACED, "one-worker-3-1"),
        Moment(began + 0.070, traced.SENT, "one-worker-3-1"),
        Moment(began + 0.080, traced.SENT, "one-worker-4-1"),
    )
    file.write_text("".join(json.dumps(asdict(each)) + "\n" for each in told))
    received = START + timedelta(milliseconds=76)
    found = traced.parts(list(traced.read(file)), "one-worker-3-0", "one-worker-3-1", START, received)
    assert list(found.values()) == pytest.approx([10, 3, 2, 1, 50, 4, 6], abs=0.01)
    assert list(found)[4] == "until there was a place"
