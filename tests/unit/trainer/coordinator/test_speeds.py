"""The measured speeds: what counts, what is dropped, and that sums only grow."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dev.night import examples
from shoal_trainer.contract import MAX_SPEEDS, StopAfter
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.members import SILENCE_SECONDS
from shoal_trainer.coordinator.protocol import Heartbeat, Leave
from shoal_trainer.coordinator.speeds import SETTLE_SECONDS, SETTLE_STEPS, Speeds
from shoal_trainer.ps.aligned import aligned
from shoal_trainer.wire.messages import Progress, PushMeta, Timings
from tests.unit.trainer.coordinator.bench import MODEL, Bench
from tests.unit.trainer.ps.shards import push_to

A, B = (0, 0), (1, 0)
TIMINGS = Timings(step=0.1, compute=0.06, pull=0.02, push=0.01, input=0.02)


def where(device: str = "T4", batch: int = 32) -> tuple[str, int, int, int]:
    return device, 1, 4, batch


class Clock:
    """Speeds in virtual time; `run` lets workers push every `step` seconds and observes four times a second."""

    def __init__(self, servers: int = 2) -> None:
        self.now = 0.0
        self.speeds = Speeds(servers)

    def run(self, seconds: float, team: frozenset, step: float = 0.25, left: frozenset = frozenset()) -> None:
        until = self.now + seconds
        while self.now < until:
            self.speeds.observe(self.now, team, step, left)
            for worker in team:
                self.speeds.pushed(self.now, worker, where, TIMINGS)
            self.now += step

    @property
    def counts(self) -> dict[tuple, int]:
        return {row.key: row.compute.count for row in self.speeds.report()}


def test_steps_of_a_settled_team_count_with_its_size_and_the_servers() -> None:
    clock = Clock()
    clock.run(SETTLE_SECONDS + 4 * SILENCE_SECONDS, frozenset({A}))
    (row,) = clock.speeds.report()
    assert row.key == ("T4", 1, 4, 32, 1, 2)
    assert row.compute.mean == pytest.approx(math.log(0.08))
    assert (row.pull.mean, row.push.mean) == (pytest.approx(math.log(0.02)), pytest.approx(math.log(0.01)))
    assert row.step.mean == pytest.approx(math.log(0.1))
    assert row.compute.variance == pytest.approx(0, abs=1e-9)
    assert 0 < row.compute.count == row.pull.count <= 4 * SILENCE_SECONDS / 0.25


def test_nothing_counts_before_a_change_of_members_has_settled() -> None:
    clock = Clock()
    for team in (frozenset({A}), frozenset({A, B})) * 5:
        clock.run(SETTLE_SECONDS - 1, team)
    assert clock.counts == {}


def test_slow_workers_settle_for_ten_of_their_steps() -> None:
    clock, step = Clock(), 6.0
    clock.run(SETTLE_STEPS * step, frozenset({A}), step)
    assert clock.counts == {}
    clock.run(10 * step, frozenset({A}), step)
    assert sum(clock.counts.values()) > 0


def test_what_was_measured_before_a_loss_was_noticed_is_dropped() -> None:
    """For up to 5 s after a worker vanished, the others' steps are those of a smaller job."""
    clock, both = Clock(), frozenset({A, B})
    clock.run(60, both)
    before = clock.counts
    for worker_lost_for in (0.25, SILENCE_SECONDS):
        at = clock.now
        while clock.now < at + worker_lost_for:  # B is silent; nobody knows
            clock.speeds.observe(clock.now, both, 0.25)
            clock.speeds.pushed(clock.now, A, lambda: where("H100-80GB"), TIMINGS)
            clock.now += 0.25
        clock.run(SETTLE_SECONDS + 20, frozenset({A}))
        clock.run(SETTLE_SECONDS + 20, both)
    assert not any(key[0] == "H100-80GB" for key in clock.counts)
    assert clock.counts["T4", 1, 4, 32, 2, 2] >= before["T4", 1, 4, 32, 2, 2]


def test_what_was_measured_before_a_worker_came_or_said_that_it_leaves_counts() -> None:
    """Both are known at once: of 11 s of a settled team, none is lost, whatever follows."""
    clock, both = Clock(), frozenset({A, B})
    clock.run(SETTLE_SECONDS + 11, both)
    clock.run(SETTLE_SECONDS, frozenset({A}), left=frozenset({B}))
    clock.run(SETTLE_SECONDS + 11, both)
    clock.run(3 * SILENCE_SECONDS, frozenset(), left=both)
    assert clock.counts["T4", 1, 4, 32, 2, 2] == 2 * 2 * 11 / 0.25


def test_after_a_goodbye_the_others_settle_for_ten_steps() -> None:
    """Nothing of theirs is new: only the servers' queue has to empty."""
    clock, step = Clock(), 0.25
    clock.run(60, frozenset({A, B}))
    clock.run(7, frozenset({A}), left=frozenset({B}))
    clock.run(3 * SILENCE_SECONDS, frozenset(), left=frozenset({A}))
    assert clock.counts["T4", 1, 4, 32, 1, 2] == 7 / step - SETTLE_STEPS


def test_a_goodbye_does_not_end_the_settling_of_another_worker() -> None:
    clock = Clock()
    clock.run(30, frozenset({A}))
    clock.run(3, frozenset({A, B}))
    clock.run(SETTLE_SECONDS - 4, frozenset({B}), left=frozenset({A}))
    clock.run(3 * SILENCE_SECONDS, frozenset(), left=frozenset({B}))
    assert ("T4", 1, 4, 32, 1, 2) in clock.counts  # of A, before
    clock = Clock()
    clock.run(3, frozenset({A, B}))
    clock.run(SETTLE_SECONDS - 4, frozenset({B}), left=frozenset({A}))
    clock.run(3 * SILENCE_SECONDS, frozenset(), left=frozenset({B}))
    assert clock.counts == {}


def test_a_loss_that_is_noticed_after_a_goodbye_drops_what_was_measured_before_both() -> None:
    clock, three = Clock(), frozenset({A, B, (2, 0)})
    clock.run(SETTLE_SECONDS + 4, three)
    clock.run(1, frozenset({A, B}), left=frozenset({(2, 0)}))
    clock.run(SETTLE_SECONDS - 1, frozenset({A}), left=frozenset({(2, 0)}))
    clock.run(3 * SILENCE_SECONDS, frozenset(), left=three)
    assert clock.counts == {}


def test_steps_during_and_right_after_a_task_do_not_count() -> None:
    clock = Clock()
    clock.run(60, frozenset({A}))
    before = sum(clock.counts.values())
    until = clock.now + 30
    while clock.now < until:
        clock.speeds.observe(clock.now, frozenset({A}), 0.25)
        clock.speeds.task(clock.now)
        clock.speeds.pushed(clock.now, A, lambda: where("H100-80GB"), TIMINGS)
        clock.now += 0.25
    clock.run(20, frozenset({A}))
    assert set(clock.counts) == {("T4", 1, 4, 32, 1, 2)}
    assert sum(clock.counts.values()) > before  # a task does not make the members settle again


def test_local_steps_of_an_outage_do_not_count() -> None:
    clock = Clock()
    clock.run(60, frozenset({A}))
    clock.speeds.pushed(clock.now, A, lambda: where("H100-80GB"), Timings())
    clock.run(20, frozenset({A}))
    assert set(clock.counts) == {("T4", 1, 4, 32, 1, 2)}


def test_the_report_is_bounded_and_keeps_what_was_measured_last() -> None:
    clock, team = Clock(), frozenset({A})
    clock.run(SETTLE_SECONDS, team)
    for batch in range(1, 2 * MAX_SPEEDS):
        until = clock.now + 2.5 * SILENCE_SECONDS
        while clock.now < until:
            clock.speeds.observe(clock.now, team, 0.25)
            clock.speeds.pushed(clock.now, A, lambda batch=batch: where(batch=batch), TIMINGS)
            clock.now += 0.25
    batches = [key[3] for key in clock.counts]
    assert len(batches) == MAX_SPEEDS
    assert min(batches) > 2 * MAX_SPEEDS - MAX_SPEEDS - 3


EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("team"), st.sets(st.sampled_from([A, B, (2, 0), (2, 1)]))),
        st.tuples(st.just("wait"), st.floats(0, 40)),
        st.tuples(st.just("task"), st.none()),
        st.tuples(st.just("disturbed"), st.none()),
    ),
    max_size=40,
)


@settings(max_examples=examples(100))
@given(EVENTS, st.sampled_from([0.1, 1.0, 4.0]))
def test_sums_only_grow_and_only_by_settled_steps(events: list, step: float) -> None:
    """Counted against a list of all pushes with the team's true age at each."""
    speeds, now, changed, team = Speeds(1), 0.0, 0.0, frozenset()
    settled: dict[int, int] = {}
    last: dict[tuple, tuple[int, float, float]] = {}
    for kind, value in events:
        if kind == "team" and frozenset(value) != team:
            team, changed = frozenset(value), now
        elif kind == "disturbed":
            speeds.disturbed(now)
            changed = now
        elif kind == "task":
            speeds.task(now)
        elif kind == "wait":
            until = now + value
            while now < until:
                speeds.observe(now, team, step)
                for worker in sorted(team):
                    speeds.pushed(now, worker, where, TIMINGS)
                    if now - changed >= max(SETTLE_SECONDS, SETTLE_STEPS * step):
                        settled[len(team)] = settled.get(len(team), 0) + 1
                now += step
        speeds.observe(now, team, step)
        for row in speeds.report():
            found = row.compute.count, row.compute.squares, -row.compute.total  # ln(0.08) < 0
            assert all(a >= b for a, b in zip(found, last.get(row.key, (0, 0.0, 0.0)), strict=True))
            assert row.compute.count == row.pull.count == row.push.count
            assert row.compute.count <= settled.get(row.workers, 0)
            last[row.key] = found
    assert set(last) == {row.key for row in speeds.report()}


# --- in the coordinator -----------------------------------------------------------------------------------------------


def train(
    bench: Bench, slots: tuple[int, ...], seconds: float, step: float = 0.5, done: float = math.inf
) -> None:
    """These workers push every `step` seconds; the positions are the same each time, so the ledger does not end."""
    until = bench.now + seconds
    while bench.now < until:
        for slot in slots:
            bench.seq[slot, 0] = seq = bench.seq.get((slot, 0), 0) + 1
            meta = PushMeta(samples=2, loss=0.5, timings=TIMINGS, progress=(Progress(0, -1, 0, 2),))
            push_to(bench.shard, slot, 0, seq, bench.shard.history.version, meta, aligned(4), delta=True)
        bench.coordinator.tick()
        bench.now += step


def rows(bench: Bench) -> dict[tuple, int]:
    return {row.key: row.compute.count for row in report.status(bench.coordinator).speed}


def test_rows_carry_what_the_workers_told_when_they_joined() -> None:
    bench = Bench(stop=StopAfter(epochs=9))
    bench.join(0, device="T4", device_name="Tesla T4", devices=2, cores=8, tensors=6)
    train(bench, (0,), 60)
    assert set(rows(bench)) == {("T4", 2, 8, 2, 1, 1)}
    worker = report.status(bench.coordinator).workers[0]
    assert (worker.device, worker.device_name, worker.devices, worker.cores) == ("T4", "Tesla T4", 2, 8)


def test_a_worker_is_told_with_the_time_of_its_last_push() -> None:
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    assert report.status(bench.coordinator).workers[0].last_push_seconds == 0.0
    train(bench, (0,), 5)
    bench.now += 1.25
    assert report.status(bench.coordinator).workers[0].last_push_seconds == pytest.approx(0.5 + 1.25)


def test_one_and_two_workers_have_their_own_rows() -> None:
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    train(bench, (0,), 60)
    bench.join(1)
    train(bench, (0, 1), 60)
    counts = {key[4]: count for key, count in rows(bench).items()}
    assert counts.keys() == {1, 2}
    assert counts[2] > counts[1] > 20


def test_a_worker_that_drains_leaves_what_was_measured_with_it() -> None:
    bench = Bench(stop=StopAfter(epochs=9))
    bench.join(0, device="T4")
    bench.join(1, device="T4")
    train(bench, (0, 1), SETTLE_SECONDS + 11)
    bench.coordinator.leave(Leave(slot=1, incarnation=0))
    train(bench, (0,), 2 * SILENCE_SECONDS + 1)
    assert rows(bench)["T4", 1, 0, 2, 2, 1] >= 2 * 10 / 0.5


def stalling(bench: Bench, workers: int, every: float, stall: float, seconds: float) -> list[float]:
    """Workers with steps of 1 s, of which each stalls once in so many seconds, and is heard. The times of all."""
    until, step, taken = bench.now + seconds, 1.0, list[float]()
    begins, ends, number = [bench.now] * workers, [bench.now + step] * workers, [0] * workers
    while bench.now < until:
        for slot in range(workers):
            if ends[slot] <= bench.now:
                took = ends[slot] - begins[slot]
                taken.append(took)
                bench.seq[slot, 0] = seq = bench.seq.get((slot, 0), 0) + 1
                timings = TIMINGS._replace(step=took, compute=took - 0.1)
                meta = PushMeta(samples=2, loss=0.5, timings=timings, progress=(Progress(0, -1, 0, 2),))
                push_to(bench.shard, slot, 0, seq, bench.shard.history.version, meta, aligned(4), delta=True)
                number[slot] += 1
                late = (number[slot] + slot * round(every / step) // workers) % round(every / step) == 0
                begins[slot], ends[slot] = ends[slot], ends[slot] + (stall if late else step)
            if bench.now % 2.0 == 0:
                bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        bench.coordinator.tick()
        bench.now += 0.5
    return taken


@pytest.mark.parametrize(("workers", "every", "stall"), [(4, 20.0, 6.0), (1, 40.0, 20.0)])
def test_steps_of_workers_that_stall_now_and_then_are_measured(
    workers: int, every: float, stall: float
) -> None:
    """Each stall dropped what all had measured: of 65,000 steps 341 counted, the quick ones."""
    bench = Bench(stop=StopAfter(epochs=9))
    for slot in range(workers):
        bench.join(slot, device="T4")
    taken = stalling(bench, workers, every, stall, 150)
    (row,) = report.status(bench.coordinator).speed
    assert row.workers == workers
    assert row.step.count > 0.7 * len(taken)
    assert row.step.seconds / row.step.count == pytest.approx(sum(taken) / len(taken), rel=0.1)


@pytest.mark.parametrize("heard", [True, False])
def test_what_others_measure_while_a_worker_is_late_counts_only_if_it_pushes_again(heard: bool) -> None:
    """It may be lost, and the others a smaller job: that is known after a minute, or once it is silent."""
    bench = Bench(stop=StopAfter(epochs=9))
    for slot in (0, 1):
        bench.join(slot, device="T4")
    train(bench, (0, 1), 60)
    before = rows(bench)
    until = bench.now + 40
    while bench.now < until:
        train(bench, (0,), 1)
        if heard:
            bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
    at_most = 2 * SILENCE_SECONDS * 2 / 0.5
    kept_back = rows(bench)["T4", 1, 0, 2, 2, 1] - before["T4", 1, 0, 2, 2, 1]
    assert kept_back <= at_most, "only of the time before it"
    assert (("T4", 1, 0, 2, 1, 1) in rows(bench)) is not heard
    if heard:
        train(bench, (0, 1), 20)
        assert rows(bench)["T4", 1, 0, 2, 2, 1] - before["T4", 1, 0, 2, 2, 1] > 40 / 0.5


def test_a_worker_without_work_is_no_late_one() -> None:
    bench = Bench(stop=StopAfter(epochs=9))
    for slot in (0, 1):
        bench.join(slot, device="T4")
    train(bench, (0, 1), 30)
    member = bench.coordinator.members.known[1, 0]
    member.idle_since = bench.now
    until = bench.now + 40
    while bench.now < until:
        train(bench, (0,), 1)
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
    assert rows(bench)["T4", 1, 0, 2, 1, 1] > 20


def test_a_worker_that_joined_but_does_not_push_yet_does_not_count_as_a_member() -> None:
    """It may compile for minutes, in which the others train as before."""
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    train(bench, (0,), 30)
    bench.join(1)
    for _ in range(60):
        train(bench, (0,), 1)
        bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0))
    assert {key[4] for key in rows(bench)} == {1}


def test_a_worker_that_has_not_joined_a_restarted_coordinator_has_no_row() -> None:
    """Its device is not known yet."""
    bench = Bench(stop=StopAfter(epochs=9))
    bench.shard.workers.connect(0, 0)
    bench.shard.hello(0, 0, MODEL)
    bench.shard.offer(0, 0, aligned(4))
    train(bench, (0,), 60)
    assert rows(bench) == {}


def test_a_rollback_drops_what_was_measured_before_it() -> None:
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    train(bench, (0,), SETTLE_SECONDS + 2)
    saved, copy = bench.coordinator.record.dump(), bench.shard.copy()
    assert copy is not None
    with bench.shard.lock:
        bench.shard.roll_back(copy)
        bench.coordinator.rewind(saved)
    train(bench, (0,), SETTLE_SECONDS - 1)
    assert rows(bench) == {}


def test_speeds_of_a_restarted_coordinator_begin_at_zero_in_another_epoch() -> None:
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    train(bench, (0,), 60)
    new = bench.successor()
    assert rows(new) == {}
    assert report.status(new.coordinator).speed_epoch != report.status(bench.coordinator).speed_epoch


# --- the model --------------------------------------------------------------------------------------------------------


def test_one_worker_is_asked_once_to_count_the_flops() -> None:
    bench = Bench(stop=StopAfter(epochs=9))
    for slot in range(2):
        bench.join(slot, tensors=6)
        alive = bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0))
        assert not alive.count_flops  # before it trains
    train(bench, (0, 1), 5)
    alive = [bench.coordinator.heartbeat(Heartbeat(slot=slot, incarnation=0)) for slot in (1, 0, 1)]
    assert [answer.count_flops for answer in alive] == [True, False, False]
    assert report.status(bench.coordinator).model.flops_per_sample is None
    bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0, flops_per_sample=80.0))
    model = report.status(bench.coordinator).model
    assert (model.flops_per_sample, model.tensors, model.parameters) == (80.0, 6, 4)
    assert model.fingerprint == "0" * 64


def test_another_worker_is_asked_if_the_first_one_is_lost() -> None:
    bench = Bench(stop=StopAfter(epochs=9))
    for slot in range(2):
        bench.join(slot)
    train(bench, (0, 1), 5)
    assert bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0)).count_flops
    train(bench, (1,), 330)
    assert bench.coordinator.heartbeat(Heartbeat(slot=1, incarnation=0)).count_flops


def test_a_model_whose_flops_cannot_be_counted_is_not_asked_for_again() -> None:
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    train(bench, (0,), 5)
    bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0, flops_per_sample=0.0))
    train(bench, (0,), 400)
    assert not bench.coordinator.heartbeat(Heartbeat(slot=0, incarnation=0)).count_flops
    assert report.status(bench.coordinator).model.flops_per_sample == 0.0, "and not None: nobody waits for it"


def test_the_precision_is_that_of_the_first_worker_that_says_it() -> None:
    bench = Bench(stop=StopAfter(epochs=9))
    for slot, precision in ((0, ""), (1, "float16"), (2, "float32")):
        bench.join(slot, precision=precision)
        bench.coordinator.tick()
        assert report.status(bench.coordinator).model.precision == ("float16" if slot else "")


# --- what is left -----------------------------------------------------------------------------------------------------


def test_samples_left_by_epochs_and_by_steps() -> None:
    by_epochs = Bench(stop=StopAfter(epochs=3), workers=1)
    assert report.status(by_epochs.coordinator).samples_left == 24
    lease = by_epochs.ask(0).lease
    by_epochs.push(0, lease, lease.start + 2)
    status = report.status(by_epochs.coordinator)
    assert (status.samples_left, status.data.total) == (22, 8)
    by_steps = Bench(stop=StopAfter(steps=10), workers=1)
    assert report.status(by_steps.coordinator).samples_left == 20
    lease = by_steps.ask(0).lease
    by_steps.push(0, lease, lease.start + 2)
    assert report.status(by_steps.coordinator).samples_left == 18


def test_samples_left_are_unknown_if_a_metric_ends_the_job_and_zero_at_the_end() -> None:
    by_metric = Bench(stop=StopAfter(metric="accuracy", value=0.9), workers=1)
    assert report.status(by_metric.coordinator).samples_left is None
    bench = Bench(workers=1)
    bench.train(0)
    assert report.status(bench.coordinator).samples_left == 0


def test_samples_left_are_unknown_before_the_data_are() -> None:
    assert report.status(Bench().coordinator).samples_left is None


# --- the servers' load ------------------------------------------------------------------------------------------------


def test_a_shard_counts_its_updates_and_their_bytes() -> None:
    bench = Bench(stop=StopAfter(epochs=9), workers=1)
    for _ in range(3):
        train(bench, (0,), 0.5)
    report = bench.shard.report()
    assert (report.updates, report.bytes_received, report.boot) == (3, 3 * 4 * 4, 1)
    meta = PushMeta(samples=2)
    push_to(bench.shard, 0, 0, 3, 2, meta, aligned(4), delta=True)  # resent: answered, not applied
    assert bench.shard.report().updates == 3
