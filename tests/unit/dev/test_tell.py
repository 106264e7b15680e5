"""Telling a story: what is written, what is said, and that the cluster goes, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dev.demo import tell as telling
from dev.demo.tell import Stage, Told, tell
from dev.demo.watch import Picture
from dev.errors import DevError
from shoal.api.training_job import TrainingJob

ENDED = {"Succeeded": "Complete", "Failed": "Failed"}
"""The condition of each phase in which a job has ended."""


class Cluster:
    """A backend that notes what is done to it."""

    name, env = "fake", {"KUBECONFIG": "/k", "PATH": "/bin"}

    def __init__(self) -> None:
        self.done: list[str] = []

    def check(self) -> None:
        self.done.append("check")

    def down(self) -> None:
        self.done.append("down")

    def left(self) -> str:
        return "spot-1 is dead"


class Scripted:
    """A watcher that sees these phases, one after the other."""

    name = "digits"

    def __init__(self, *phases: str) -> None:
        self.phases = list(phases)

    def look(self) -> Picture:
        phase = self.phases.pop(0)
        ended = {"status": "True", "reason": "R", "message": "", "lastTransitionTime": "2026-01-01T00:00:00Z"}
        job: dict[str, Any] = {
            "metadata": {"name": "digits"},
            "spec": {
                "training": {"entrypoint": "digits:job", "stopAfter": {"epochs": 1}},
                "workers": {"replicas": 1},
                "storage": {"uri": "s3://b"},
            },
            "status": {
                "phase": phase,
                "conditions": [{"type": ENDED[phase], **ended}] if phase in ENDED else [],
            },
        }
        return Picture(TrainingJob.model_validate(job))

    def kubectl(self, *args: str) -> str:
        return f"kubectl {args[0]}"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(telling, "choose", lambda: made)
    monkeypatch.setattr(telling, "ROOT", tmp_path)
    monkeypatch.setattr(telling, "LOOK_SECONDS", 0.0)
    monkeypatch.delenv("KEEP", raising=False)
    return made


def told(path: Path) -> Told:
    return Told({"accuracy": 0.98}, lambda picture: picture.write_text("a picture"), words=["all is well"])


def test_figures_and_picture_are_written_and_the_cluster_is_removed(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def play(stage: Stage) -> Told:
        stage.part("setUp")
        return told(tmp_path)

    assert tell("demo", play) == 0
    figures = json.loads((tmp_path / "build/demo.json").read_text())
    assert figures["accuracy"] == 0.98
    assert figures["seconds"].keys() == {"setUp", "total"}
    assert (tmp_path / "build/demo.png").read_text() == "a picture"
    assert cluster.done == ["check", "down"]
    said = capsys.readouterr().err
    assert said.index("all is well") < said.index("written to build/demo.json and build/demo.png")


def test_a_story_that_went_ill_exits_with_1(cluster: Cluster) -> None:
    assert tell("demo", lambda _: Told({}, lambda _: None, well=False)) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), DevError("it broke")])
def test_the_cluster_is_removed_after_an_error_and_ctrl_c(cluster: Cluster, error: BaseException) -> None:
    def play(_: Stage) -> Told:
        raise error

    if isinstance(error, KeyboardInterrupt):
        assert tell("demo", play) == 130
    else:
        with pytest.raises(DevError, match="it broke"):
            tell("demo", play)
    assert cluster.done[-1] == "down"


def test_keep_keeps_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KEEP", "1")
    assert tell("demo", lambda _: told(tmp_path)) == 0
    assert "down" not in cluster.done
    said = " ".join(capsys.readouterr().err.split())
    assert "make demo-down" in said
    assert "spot-1 is dead" in said
    assert (
        "the web page is at http://localhost:8082 while `kubectl --namespace shoal-system port-forward"
        in said
    )


def test_a_job_is_followed_to_its_end_and_each_picture_is_seen(cluster: Cluster) -> None:
    seen: list[str | None] = []
    stage = Stage(cluster)  # type: ignore[arg-type]
    stage.follow(
        Scripted("Starting", "Running", "Succeeded"),  # type: ignore[arg-type]
        lambda picture: seen.append(picture.job.status.phase),
        lambda _: "",
        60,
    )
    assert seen == ["Starting", "Running", "Succeeded"]


@pytest.mark.parametrize(("phases", "limit"), [(["Running", "Failed"], 60.0), (["Running"], -1.0)])
def test_a_job_that_fails_or_takes_too_long_is_an_error_with_its_state(
    cluster: Cluster, phases: list[str], limit: float
) -> None:
    stage = Stage(cluster)  # type: ignore[arg-type]
    with pytest.raises(DevError, match=r"digits (ended as Failed|had not ended).*\n.*kubectl describe"):
        stage.follow(Scripted(*phases), lambda _: None, lambda _: "", limit)  # type: ignore[arg-type]


def test_a_part_takes_the_time_since_the_last_one_and_may_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr(telling.time, "monotonic", lambda: next(now))
    stage = Stage(Cluster(), begin=next(now))  # type: ignore[arg-type]
    for part in ("starting", "training", "starting"):
        stage.part(part)
    assert stage.seconds == {"starting": 3.0, "training": 3.0}
