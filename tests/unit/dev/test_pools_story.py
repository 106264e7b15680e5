"""The story of the pools: what the played cloud does, what the script takes, and the figures from what was seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dev.cluster import cgroups
from dev.cluster.cgroups import Used
from dev.cluster.node import GRACE_SECONDS
from dev.demo import tell as telling
from dev.demo.local import Local
from dev.demo.pools import story
from dev.demo.pools.chart import draw
from dev.demo.pools.cloud import LABEL, Machine, Offer, decide
from dev.demo.pools.figures import (
    GOALS,
    errors,
    figures,
    job_speed,
    missed,
    plan_changes,
    predicted_at_half,
    step_seconds,
    throughput,
)
from dev.demo.pools.record import Moment, WorkerSeen
from dev.demo.pools.story import Script, documents, first_job, offers, second_job, values
from dev.demo.pools.work import FEWEST_EPOCHS, epochs, measured
from dev.demo.tell import Stage
from dev.demo.watch import Picture
from dev.errors import DevError
from shoal.api.training_job import TrainingJob

OFFERS = {"fast": Offer(0.3, True, 6, 2), "slow": Offer(0.15, True, 6, 1)}


def pod(pool: str, node: str = "", phase: str = "Pending", **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": metadata,
        "spec": {"nodeSelector": {LABEL: pool}, **({"nodeName": node} if node else {})},
        "status": {"phase": phase},
    }


def test_a_waiting_pod_gets_a_machine_of_its_pool_while_there_is_stock() -> None:
    waiting = [pod("fast"), pod("fast"), pod("fast"), pod("slow"), pod("slow", deletionTimestamp="now")]
    assert decide(0, OFFERS, {}, waiting, 0) == (["fast", "fast", "slow"], [])
    assert decide(0, OFFERS, {}, waiting, 1) == ([], [])
    assert decide(0, {"fast": Offer(0.3, True, 6, 0)}, {}, waiting, 0) == ([], [])


def test_an_idle_machine_is_used_before_another_is_made_and_is_taken_in_the_end() -> None:
    machines = {"fast-1": Machine("fast")}
    assert decide(1, OFFERS, machines, [pod("fast")], 0) == ([], [])
    assert decide(1 + 6, OFFERS, machines, [], 0) == ([], ["fast-1"])
    busy = [pod("fast", "fast-1", "Running")]
    assert decide(99, OFFERS, machines, busy, 0) == ([], [])
    assert machines["fast-1"].idle_since is None


def test_a_machine_with_notice_is_not_counted_and_ends() -> None:
    machines = {"fast-1": Machine("fast", noticed_at=0.0)}
    running, waiting = pod("fast", "fast-1", "Running"), pod("fast")
    assert decide(1, OFFERS, machines, [running, waiting], 0) == (["fast"], [])
    assert decide(GRACE_SECONDS, OFFERS, machines, [running], 0) == ([], ["fast-1"])


@given(st.lists(st.sampled_from(["fast", "slow", "other"])), st.integers(0, 4), st.integers(0, 4))
def test_there_are_never_more_machines_than_stock(pods: list[str], fast: int, have: int) -> None:
    machines = {f"fast-{n}": Machine("fast") for n in range(have)}
    made, _ = decide(0, {"fast": Offer(0.3, True, 6, fast)}, machines, [pod(each) for each in pods], 0)
    assert have + len(made) <= max(have, fast)
    assert len(made) <= pods.count("fast")


def worker(pool: str, slot: int, samples: int, beside: float = 0.0) -> WorkerSeen:
    return WorkerSeen((slot, 0), pool, True, samples, samples // 10, beside)


def run_of(*workers: str, count: int = 30, rate: int = 100) -> list[Moment]:
    """A job whose workers make `rate` samples a second each, and that is half done in the middle."""
    return [
        Moment(
            at=float(t),
            phase="Running",
            workers=tuple(worker(pool, slot, rate * t) for slot, pool in enumerate(workers)),
            progress=100 * t / count,
            remaining=1.1 * (count - t),
            remaining_range=(0.9 * (count - t), 1.3 * (count - t)),
            plan=(("fast", 1 if t < 10 else 2),),
            reason="because",
            cost=0.1 * t,
        )
        for t in range(count)
    ]


def test_speeds_are_measured_from_the_samples_of_settled_workers() -> None:
    assert throughput(run_of("fast", "slow")) == {"fast": pytest.approx(100), "slow": pytest.approx(100)}
    assert job_speed(run_of("fast", "slow")) == pytest.approx(200)
    assert throughput(run_of("fast", count=5)) == {}
    assert step_seconds(run_of("fast", "slow")) == {"fast": pytest.approx(0.1), "slow": pytest.approx(0.1)}
    evaluates = [
        replace(m, workers=(worker("fast", 0, 100 * int(m.at), 0.2 * m.at),)) for m in run_of("fast")
    ]
    assert step_seconds(evaluates) == {"fast": pytest.approx(0.08)}
    assert throughput(evaluates) == {"fast": pytest.approx(100)}
    exports = [replace(run_of("fast")[-1], at=30.0 + t, progress=100.0) for t in range(20)]
    assert job_speed([*run_of("fast"), *exports]) == pytest.approx(100)
    assert job_speed([]) is None
    assert errors({"fast": 0.11}, {"fast": 0.1, "slow": 1.0}) == {"fast": 0.1}


def test_a_start_beside_is_no_part_of_the_speed_of_a_pool() -> None:
    """The machine that all share is busy then: steps of 0.1 s take 0.5 s until ten seconds after the other began."""
    alone = run_of("fast")
    slowed = [replace(m, at=30.0 + t, workers=(worker("fast", 0, 3000 + 20 * t), worker("slow", 1, 20 * t)))
              for t, m in enumerate(run_of("fast", count=11))]  # fmt: skip
    both = [replace(m, at=40.0 + m.at, workers=(worker("fast", 0, 3200 + 100 * int(m.at)), worker("slow", 1, 200)))
            for m in run_of("fast")[1:]]  # fmt: skip
    assert step_seconds([*alone, *slowed, *both])["fast"] == pytest.approx(0.1)
    assert throughput([*alone, *slowed, *both])["fast"] < 95


def test_plan_changes_say_from_what_to_what_and_why() -> None:
    assert plan_changes(run_of("fast")) == [
        {"at": 0.0, "from": {}, "to": {"fast": 1}, "reason": "because"},
        {"at": 10.0, "from": {"fast": 1}, "to": {"fast": 2}, "reason": "because"},
    ]


def figures_of(moments: list[Moment], **changes: Any) -> dict[str, Any]:
    told: dict[str, Any] = {
        "deadline": 40.0,
        "finished": 30.0,
        "samples": 6000.0,
        "learned": {"fast": 0.105, "od": 0.1},
        "cores": {"fast": 0.2, "slow": 0.1, "od": 0.2},
        "on_demand": ("od", 3600.0),
        "second": (190.0, run_of("fast", "fast")),
    }
    return figures(moments, **{**told, **changes})


def test_figures_come_from_what_was_seen() -> None:
    found = figures_of(run_of("fast", "od"))
    assert found["deadlineKept"]
    assert found["finishPredictedAtHalf"] == pytest.approx(31.5)
    assert found["finishError"] == pytest.approx(0.05)
    assert found["speedErrorByPool"] == {"fast": 0.05, "od": 0.0}
    assert found["cost"] == pytest.approx(2.9)
    assert found["onDemandOnlyCost"] == pytest.approx(60)  # 60 s of a worker at 1 a second
    assert found["secondJobFirstPredictionError"] == pytest.approx(0.05)
    assert missed(found) == []


def slowed(moments: list[Moment], factor: float, cores: float = 0.2) -> list[Moment]:
    """The same on a machine so many times slower, whose workers use `cores` each."""

    def seen(each: WorkerSeen, at: float) -> WorkerSeen:
        samples, steps = round(each.samples / factor), round(each.steps / factor)
        return replace(each, samples=samples, steps=steps, used=Used(1 + cores * at))

    return [replace(m, workers=tuple(seen(each, m.at) for each in m.workers)) for m in moments]


def test_figures_of_different_minutes_are_compared_at_one_pace_of_the_machine() -> None:
    """The machine is twice as slow in the second half, when only on-demand trains, and in the second job.

    What was learned is right for the mean of both; neither pool was as fast as that while it was seen.
    """
    first = slowed(run_of("fast", count=100), 1.0)
    then = [
        replace(m, at=m.at + 100.0, workers=tuple(replace(w, key=(1, 0)) for w in m.workers))
        for m in slowed(run_of("od", count=200), 2.0)
    ]
    seen = slowed(run_of("fast", "fast"), 2.0)
    mean = 300 / (99 * 10 + 199 * 5)  # 0.1 and 0.2 s a step
    found = figures_of([*first, *then], learned={"fast": mean, "od": mean}, second=(2 * 10 / mean, seen))
    assert found["speedErrorByPool"] == {"fast": pytest.approx(0, abs=0.02), "od": pytest.approx(0, abs=0.02)}
    assert found["asSeen"]["speedErrorByPool"]["fast"] == pytest.approx(0.5, abs=0.02)
    assert found["asSeen"]["speedErrorByPool"]["od"] == pytest.approx(-0.25, abs=0.02)
    assert found["costRatio"] == pytest.approx(found["asSeen"]["costRatio"] * 0.2 / mean, rel=0.02)
    assert found["secondJobFirstPredictionError"] == pytest.approx(0, abs=0.02)
    assert found["asSeen"]["secondJobFirstPredictionError"] == pytest.approx(0.333, abs=0.02)
    assert [ms for at, ms in found["machine"]["msOfAStep"]][::14] == [pytest.approx(20), pytest.approx(40)]


def test_what_was_learned_wrong_is_wrong_at_any_pace() -> None:
    """Workers that wait half of the time use half of their share: that is no slower machine."""
    waits = slowed(slowed(run_of("fast", "od", count=100), 2.0), 1.0, cores=0.1)
    found = figures_of(waits, learned={"fast": 0.1, "od": 0.2})
    assert found["speedErrorByPool"] == {
        "fast": pytest.approx(-0.5, abs=0.02),
        "od": pytest.approx(0, abs=0.02),
    }


def test_what_was_not_seen_is_not_made_up_and_is_a_goal_that_was_missed() -> None:
    found = figures_of([], finished=None, second=(None, []))
    unknown = ("finishPredictedAtHalf", "finishActual", "onDemandOnlyCost", "secondJobFirstPredictionError")
    assert [found[name] for name in unknown] == [None] * 4
    assert len(missed(found)) == len(GOALS)
    assert predicted_at_half([]) is None


def test_picture_is_drawn_also_without_a_prediction(tmp_path: Path) -> None:
    draw(tmp_path / "a.png", run_of("fast", "slow"), ["fast", "slow"], 40.0, 30.0, {10.0: "taken"})
    draw(tmp_path / "b.png", [Moment(0.0, "")], ["fast", "slow"], 40.0, None, {})
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))


class _Cloud:
    def __init__(self, *_: object) -> None:
        self.did: list[str] = []
        self.report = self.did.append
        self.machines: dict[str, Machine] = {}
        self.offers: dict[str, Offer] = {}

    def advance(self, _pods: object, trains: list[str]) -> None:
        self.did.append(f"advance {trains}")

    def used(self) -> dict[str, Used]:
        return {}

    def close(self) -> None:
        self.did.append("close")

    def reclaim(self, pool: str) -> list[str]:
        self.did.append(f"reclaim {pool}")
        return ["a"]

    def stock(self, pool: str, number: int) -> None:
        self.did.append(f"stock {pool} {number}")


def test_the_pool_is_taken_once_and_comes_back_after_on_demand_has_trained() -> None:
    cloud = _Cloud()
    script = Script(cloud)  # type: ignore[arg-type]

    def at(seconds: float, progress: float, *pools: str) -> None:
        workers = tuple(worker(pool, slot, 0) for slot, pool in enumerate(pools))
        script.advance(Moment(seconds, "Running", workers, progress))

    at(10, 10, "spot-fast")
    assert not cloud.did
    at(20, 40, "spot-fast")
    at(21, 41, "spot-fast")
    at(40, 45, "on-demand-fast")
    assert [did for did in cloud.did if did.startswith(("reclaim", "stock"))] == ["reclaim spot-fast"]
    at(60, 60, "on-demand-fast")
    at(61, 60, "on-demand-fast")
    assert [did for did in cloud.did if did.startswith("stock")] == ["stock spot-fast 2"]
    assert list(script.events) == [20, 60]


def test_the_example_is_what_the_story_runs() -> None:
    manifests = documents()
    offered = offers(manifests)
    assert {name: (offer.cores, offer.spot) for name, offer in offered.items()} == {
        "spot-fast": (0.2, True),
        "spot-slow": (0.1, True),
        "on-demand-fast": (0.2, False),
    }
    job = next(each for each in manifests if each["kind"] == "TrainingJob")
    first = first_job(job, 3760.0, 1437)
    assert first["spec"]["training"]["stopAfter"] == {"epochs": round(90 * 3760 / 1437)}
    again = TrainingJob.model_validate(second_job(first, "model-1", 1000.0, 1437))
    assert again.spec.training.stop_after.epochs == round(45 * 1000 / 1437)
    assert again.spec.elasticity.mode == "Manual"
    assert again.metadata.annotations == {"shoal.dev/speed-profile": "model-1"}
    assert values()["replicas"] == "1"


def test_jobs_have_so_much_to_do_that_they_last_as_long_on_any_machine() -> None:
    assert (epochs(90, 1000.0, 1500), epochs(90, 2000.0, 1500)) == (60, 120)
    assert epochs(90, 0.0, 1500) == epochs(90, 1000.0, 0) == FEWEST_EPOCHS


@pytest.mark.nightly
def test_the_speed_of_this_machine_is_measured_by_the_example_itself() -> None:
    rate, samples = measured()
    assert rate > 100
    assert samples == 1437


def test_both_jobs_are_played_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    done: list[str] = []
    end = "2026-01-01T00:01:40Z"
    ended = [{"type": "Complete", "status": "True", "reason": "R", "message": "", "lastTransitionTime": end}]
    times = {"startTime": "2026-01-01T00:00:00Z", "completionTime": end}
    job = next(each for each in documents() if each["kind"] == "TrainingJob")

    class Watching:
        def __init__(self, _backend: object, _namespace: str, name: str) -> None:
            self.name = name
            self.statuses = iter([{"phase": "Running"}, {"phase": "Succeeded", "conditions": ended, **times}])

        def look(self) -> Picture:
            return Picture(TrainingJob.model_validate({**job, "status": next(self.statuses)}))

        def kubectl(self, *_args: str) -> str:
            return '{"items": [{"metadata": {"name": "model-1"}, "spec": {}}]}'

    class Played(Local):
        def __init__(self) -> None:
            plane = SimpleNamespace(env={}, kubectl=lambda *args: done.append(" ".join(args)))
            self.cluster = SimpleNamespace(plane=plane, node=lambda _: SimpleNamespace(limit=lambda _: None))  # type: ignore[assignment]

        def up(self, nodes: Any = ()) -> None:
            done.append(f"up {nodes}")

    monkeypatch.setattr(story, "Watcher", Watching)
    monkeypatch.setattr(story, "Cloud", _Cloud)
    monkeypatch.setattr(story, "measured", lambda: (9400.0, 1437))
    monkeypatch.setattr(story, "APPLIED", tmp_path / "build" / "applied.yaml")
    monkeypatch.setattr(telling, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(telling, "command", lambda *args, **_: done.append(" ".join(args[:2])))
    stage = Stage(Played())
    told = story.pools(stage)
    assert done == [
        "up [('base', False)]", "label node base example.com/pool=base", "helm upgrade",
        "kubectl --namespace", "kubectl --namespace",
    ]  # fmt: skip
    assert stage.seconds.keys() == {"setUp", "firstJob", "secondJob"}
    assert told.well
    assert told.figures["finishActual"] == 100.0
    assert any("finishError" in words for words in told.words)
    told.draw(tmp_path / "pools.png")
    assert (tmp_path / "pools.png").exists()


def test_the_pools_are_played_on_the_local_cluster_only() -> None:
    with pytest.raises(DevError, match="STORY=pools needs the local cluster"):
        story.pools(Stage(SimpleNamespace()))  # type: ignore[arg-type]


@pytest.mark.parametrize("unified", [True, False])
def test_the_share_of_a_node_is_written_as_its_cgroup_wants_it(tmp_path: Path, unified: bool) -> None:
    folder = tmp_path / ("node" if unified else "cpu/node")
    folder.mkdir(parents=True)
    if unified:
        (tmp_path / "cgroup.controllers").write_text("cpu")
    else:
        (folder / "cpu.cfs_quota_us").write_text("-1")
    cgroups.limit("node", 0.3, tmp_path)
    name = "cpu.max" if unified else "cpu.cfs_quota_us"
    assert (folder / name).read_text() == ("3000 10000" if unified else "3000")
    cgroups.limit("node", 0.0, tmp_path)
    assert (folder / name).read_text() == ("max 10000" if unified else "-1")


@pytest.mark.parametrize("unified", [True, False])
def test_what_a_node_used_of_the_cpus_is_read_as_its_cgroup_says_it(tmp_path: Path, unified: bool) -> None:
    if unified:
        (tmp_path / "node").mkdir()
        (tmp_path / "cgroup.controllers").write_text("cpu")
        text = "usage_usec 2500000\nuser_usec 1\nnr_periods 300\nnr_throttled 200\nthrottled_usec 1500000\n"
        (tmp_path / "node" / "cpu.stat").write_text(text)
    else:
        for name in ("cpu", "cpuacct"):
            (tmp_path / name / "node").mkdir(parents=True)
        text = "nr_periods 300\nnr_throttled 200\nthrottled_time 1500000000\n"
        (tmp_path / "cpu" / "node" / "cpu.stat").write_text(text)
        (tmp_path / "cpuacct" / "node" / "cpuacct.usage").write_text("2500000000\n")
    assert cgroups.used("node", tmp_path) == Used(2.5, 300, 200, 1.5)
    with pytest.raises(OSError, match="gone"):
        cgroups.used("gone", tmp_path)
