"""The story of the losses, played on pictures: three faults by the job's progress, then figures and a picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from dev.demo import losses as story
from dev.demo import tell as telling
from dev.demo.tell import Stage
from dev.demo.watch import Picture
from dev.errors import DevError
from shoal.api.training_job import TrainingJob
from shoal_trainer.contract import Phase, StatusReport, WorkerReport, WorkerState

MANIFEST = next(yaml.safe_load_all(story.MANIFEST.read_text()))
WORKERS = MANIFEST["spec"]["workers"]["replicas"]


def pod(role: str, index: int, node: str) -> dict[str, Any]:
    labels = {"shoal.dev/role": role, "shoal.dev/index": str(index), "shoal.dev/incarnation": "0"}
    return {
        "metadata": {"name": f"digits-{role}-{index}-0", "labels": labels},
        "spec": {"nodeName": node},
        "status": {"phase": "Running"},
    }


PODS = (pod("ps", 0, "safe-1"), *(pod("worker", each, f"spot-{each + 1}") for each in range(WORKERS)))


def picture(percent: float | None) -> Picture:
    """All workers train, and so much is done; None: the job has ended."""
    ended = {"type": "Complete", "status": "True", "reason": "Trained", "message": "",
             "lastTransitionTime": "2026-01-01T00:00:00Z"}  # fmt: skip
    status = {"phase": "Succeeded", "conditions": [ended]} if percent is None else {"phase": "Running"}
    workers = tuple(
        WorkerReport(slot=each, incarnation=0, state=WorkerState.ACTIVE, first_push_at=1.0)
        for each in range(WORKERS)
    )
    phase = Phase.TRAINING if percent is not None else Phase.SUCCEEDED
    report = StatusReport(job_uid="u", phase=phase, workers=workers, progress_percent=percent or 100.0)
    return Picture(TrainingJob.model_validate({**MANIFEST, "status": status}), PODS, report, fresh=True)


class Cluster:
    """What is done to it."""

    env: dict[str, str] = {}  # noqa: RUF012
    audit_log = Path("/dev/null")

    def __init__(self) -> None:
        self.done: list[str] = []

    def up(self) -> None:
        self.done.append("up")

    def notice(self, node: str) -> None:
        self.done.append(f"notice {node}")

    def kill(self, node: str) -> None:
        self.done.append(f"kill {node}")


def play(monkeypatch: pytest.MonkeyPatch, *done: float | None) -> tuple[Cluster, telling.Told, Stage]:
    cluster, pictures = Cluster(), iter([picture(each) for each in done])

    class Watching:
        name = "digits"
        first_pushes: dict[tuple[int, int], float] = {}  # noqa: RUF012

        def __init__(self, *_: object) -> None:
            pass

        def look(self) -> Picture:
            return next(pictures)

        def kubectl(self, *args: str) -> str:
            cluster.done.append(f"kubectl {args[0]}")
            return ""

    monkeypatch.setattr(story, "Watcher", Watching)
    monkeypatch.setattr(telling, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(telling, "command", lambda *args, **_: cluster.done.append(" ".join(args[:2])))
    stage = Stage(cluster)  # type: ignore[arg-type]
    return cluster, story.losses(stage), stage


def test_each_fault_comes_when_it_is_due(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cluster, told, stage = play(monkeypatch, 5, 12, 20, 36, 45, 51, 60, None)
    done = [
        each
        for each in cluster.done
        if each.split()[0] in {"up", "helm", "notice", "kill"} or "delete" in each
    ]
    assert done == ["up", "helm upgrade", "notice spot-1", "kubectl delete", "kill spot-2"]
    assert stage.seconds.keys() == {"setUp", "training", "finishing"}
    assert told.well
    assert told.words == [f"fault 3: the job ended before its worker was replaced; {story.TOO_SHORT}"]
    assert told.figures.keys() >= {"accuracy", "noticeToReplacementSeconds", "ranges"}
    told.draw(tmp_path / "demo.png")
    assert (tmp_path / "demo.png").stat().st_size > 1000


def test_a_job_that_ends_before_the_third_fault_is_too_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DevError, match="ended after 1 of 3 faults"):
        play(monkeypatch, 12, None)
