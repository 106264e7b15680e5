"""The coordinator beside a real shard, in virtual time."""

import math

import pytest

from shoal_trainer.contract import JobIdentity, Phase, StopAfter, WorkerState
from shoal_trainer.coordinator import report
from shoal_trainer.coordinator.coordinator import Coordinator
from shoal_trainer.coordinator.members import KEPT, Member
from shoal_trainer.coordinator.protocol import DataSpec, Join, TaskDone
from shoal_trainer.errors import Fenced, UserError
from shoal_trainer.ps.buffers import aligned
from shoal_trainer.ps.shard import ShardStore
from shoal_trainer.wire.messages import ModelSpec, OptimizerConfig, Progress, PushMeta

MODEL = ModelSpec(fingerprint="0" * 64, parameters=4, optimizer=OptimizerConfig(name="delta", batch_size=2))


class Bench:
    """A job of 8 samples in batches of 2, whose workers are called by hand."""

    def __init__(self, *, stop=None, validation=False, callbacks=False, boot=1, epoch=0):
        self.now = 0.0
        self.shard = ShardStore(0, 1, epoch, boot=boot, clock=lambda: self.now)
        job = JobIdentity(namespace="n", name="j", uid="u")
        self.coordinator = Coordinator(
            job,
            stop or StopAfter(epochs=1),
            2,
            self.shard,
            clock=lambda: self.now,
            wall=lambda: 1000 + self.now,
        )
        self.data = DataSpec(size=8, validation=validation, callbacks=callbacks)
        self.seq = {}
        self.version = 0

    def join(self, slot, incarnation=0, data=None, **told):
        self.shard.connect(slot, incarnation)
        if not self.shard.hello(slot, incarnation, MODEL).initialized:
            self.shard.initialize(aligned(4))
        return self.coordinator.join(
            Join(
                slot=slot,
                incarnation=incarnation,
                data=data or self.data,
                batch_size=2,
                node=f"node-{slot}",
                **told,
            )
        )

    def ask(self, slot, incarnation=0, number=None):
        return self.coordinator.next_work(slot, incarnation, number=number)

    def push(self, slot, lease, end, incarnation=0, samples=2, loss=0.5):
        self.seq[slot, incarnation] = seq = self.seq.get((slot, incarnation), 0) + 1
        mark = Progress(lease.epoch, lease.number, end - samples, end)
        meta = PushMeta(samples=samples, loss=loss, progress=(mark,))
        self.shard.delta(slot, incarnation, seq, self.shard.version, meta, aligned(4))

    def train(self, slot, incarnation=0):
        """Everything that there is to train."""
        while (given := self.ask(slot, incarnation)).kind == "data":
            self.finish(slot, given.lease, incarnation)
        return given

    def finish(self, slot, lease, incarnation=0):
        """Everything of a lease."""
        for end in range(lease.start + 2, lease.stop + 1, 2):
            self.push(slot, lease, end, incarnation)


def test_a_worker_trains_the_passes_then_exports_then_hears_the_end():
    bench = Bench()
    bench.join(0)
    given = bench.train(0)
    assert (given.kind, given.task) == ("task", "export")
    done = TaskDone(slot=0, incarnation=0, token=given.token)
    assert bench.coordinator.task_done(done) is not None
    assert bench.coordinator.task_done(done) is None
    bench.coordinator.end(bench.coordinator.succeeded())
    assert bench.ask(0).kind == "finished"
    status = bench.coordinator.status()
    assert (status.phase, status.step, status.samples) == (Phase.SUCCEEDED, 4, 8)
    assert report.ranges(bench.coordinator).once == 4


def test_evaluation_and_callbacks_of_a_pass_come_in_order_and_see_its_logs():
    bench = Bench(validation=True, callbacks=True)
    bench.join(0)
    kinds, given = [], bench.train(0)
    while given.kind == "task":
        kinds.append(given.task)
        if given.task == "callbacks":
            assert given.history[0]["val_accuracy"] == 0.75
            assert given.history[0]["loss"] == 0.5
        metrics = {"val_accuracy": 0.75} if given.task == "evaluate" else {}
        bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=given.token, metrics=metrics))
        given = bench.ask(0)
    assert kinds == ["evaluate", "callbacks", "export"]
    assert report.metrics(bench.coordinator) == {"val_accuracy": 0.75}


def test_training_stops_at_a_metrics_value():
    bench = Bench(stop=StopAfter(epochs=50, metric="accuracy", value=0.9), validation=True)
    bench.join(0)
    while (given := bench.ask(0)).kind == "data":
        bench.push(0, given.lease, given.lease.stop)
    assert given.task == "evaluate"
    metrics = {"val_accuracy": 0.95, "val_loss": 0.1}
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=given.token, metrics=metrics))
    kinds = [bench.ask(0).task for _ in range(1)]
    assert kinds in (["evaluate"], ["export"])
    assert "accuracy reached 0.95" in bench.coordinator.status().message


def test_a_metric_that_the_evaluation_does_not_give_is_the_users_error():
    bench = Bench(stop=StopAfter(epochs=1, metric="f1", value=0.9), validation=True)
    bench.join(0)
    given = bench.train(0)
    with pytest.raises(UserError, match=r"stopAfter\.metric is 'f1'"):
        bench.coordinator.task_done(
            TaskDone(slot=0, incarnation=0, token=given.token, metrics={"val_loss": 1.0})
        )


@pytest.mark.parametrize("callbacks", [True, False])
def test_training_goes_no_further_ahead_of_the_callbacks_than_a_pass(callbacks):
    bench = Bench(stop=StopAfter(epochs=4), validation=True, callbacks=callbacks)
    for slot in (0, 1):
        bench.join(slot)
    held = bench.train(0)
    assert (held.task, held.epoch) == ("evaluate", 0)
    given = bench.train(1)  # while the evaluation takes its time
    passes = bench.coordinator.ledger.completed
    assert passes == (2 if callbacks else 4)
    bench.coordinator.task_done(TaskDone(slot=0, incarnation=0, token=held.token, metrics={"val_loss": 1.0}))
    if callbacks:
        assert given.kind == "idle"
        held = bench.ask(1)
        assert (held.task, held.epoch) == ("callbacks", 0)
        bench.coordinator.task_done(TaskDone(slot=1, incarnation=0, token=held.token))
        assert bench.ask(0).epoch == 1
        assert bench.ask(1).kind == "data"


def test_no_more_steps_are_given_out_than_were_asked_for():
    bench = Bench(stop=StopAfter(steps=6))
    bench.join(0)
    bench.train(0)
    assert bench.coordinator.counters.steps == 6


def test_a_silent_worker_is_told_of_and_active_again_when_it_speaks():
    bench = Bench()
    bench.join(0)
    bench.now = 4.9
    bench.coordinator.tick()
    assert bench.coordinator.status().workers[0].state is WorkerState.ACTIVE
    bench.now = 5.1
    bench.coordinator.tick()
    assert bench.coordinator.status().workers[0].state is WorkerState.SILENT
    bench.coordinator.heartbeat(0, 0)
    assert bench.coordinator.status().workers[0].state is WorkerState.ACTIVE


def test_nobody_waits_for_a_silent_worker():
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    bench.now = 3.0
    bench.coordinator.heartbeat(1, 0)
    bench.now = 6.0
    given = bench.train(1)
    assert given.task == "export"
    assert bench.shard.samples == 8
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced):
        bench.ask(0)
    assert bench.coordinator.counters.repeated == 0
    assert bench.coordinator.counters.wasted_steps == 1


def test_nobody_waits_for_a_silent_workers_task_though_training_was_stopped():
    bench = Bench(stop=StopAfter(steps=2))
    for slot in (0, 1):
        bench.join(slot)
    assert bench.train(0).task == "export"
    bench.now = 3.0
    assert bench.ask(1).kind == "idle"
    bench.now = 6.0
    assert bench.ask(1).task == "export"


@pytest.mark.parametrize("away", [5.5, 70.0, 3600.0])
def test_that_the_coordinator_was_away_itself_is_nobodys_silence(away):
    # Its node was off the network, or its process was stopped: it heard nobody, and nobody is lost.
    bench = Bench()
    for slot in (0, 1, 2):
        bench.join(slot)
    held = bench.ask(0).lease
    bench.now = away
    bench.coordinator.tick()
    bench.train(1)
    bench.coordinator.tick()
    bench.finish(0, held)
    states = [worker.state for worker in bench.coordinator.status().workers]
    assert states == [WorkerState.ACTIVE] * 3
    # From now on silence counts: only the third one says nothing.
    for _ in range(61):
        bench.now += 1.0
        for slot in (0, 1):
            bench.coordinator.heartbeat(slot, 0)
        bench.coordinator.tick()
    states = [worker.state for worker in bench.coordinator.status().workers]
    assert states == [WorkerState.ACTIVE, WorkerState.ACTIVE, WorkerState.FENCED]


def test_of_an_incarnation_that_was_forgotten_it_is_known_that_older_ones_are_refused():
    bench = Bench()
    bench.join(0, 1)
    bench.coordinator.leave(0, 1)
    for slot in range(1, KEPT + 1):
        bench.coordinator.heartbeat(slot, 0)
    assert (0, 1) not in bench.coordinator.members.known
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(0, 0)


@pytest.mark.parametrize("goodbye", ["leave", "failed"])
def test_a_push_after_goodbye_is_refused_for_its_range_is_somebody_elses(goodbye):
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    held = bench.ask(0).lease
    said = {"leave": (0, 0), "failed": (0, 0, "why")}[goodbye]
    getattr(bench.coordinator, goodbye)(*said)
    bench.train(1)
    with pytest.raises(Fenced):
        bench.push(0, held, held.start + 2)
    assert bench.coordinator.counters.repeated == 0


def test_steps_in_vain_count_once_though_they_are_told_again():
    first, second = Bench(), Bench()  # the coordinator, and the one after the loss of parameter server 0

    def told(bench, steps, before):
        bench.join(0, wasted_steps=steps, wasted_told=before)
        return bench.coordinator.counters.wasted_steps

    assert told(first, 3, 0) == 3
    assert told(first, 3, 0) == 3  # the answer was lost
    assert told(first, 5, 0) == 5  # lost again, and more was in vain by then
    assert told(first, 5, 5) == 5
    assert told(first, 6, 5) == 6
    assert told(second, 8, 6) == 2
    assert told(second, 8, 6) == 2


def test_a_successor_takes_over_and_the_old_one_is_fenced():
    bench = Bench()
    bench.join(0)
    held = bench.ask(0).lease
    bench.join(0, incarnation=1)
    with pytest.raises(Fenced):
        bench.push(0, held, held.stop)
    with pytest.raises(Fenced):
        bench.coordinator.heartbeat(0, 0)
    bench.train(0, incarnation=1)
    assert bench.shard.samples == 8


def test_a_worker_that_leaves_gives_the_exact_rest_back():
    bench = Bench()
    bench.join(0)
    held = bench.ask(0).lease
    bench.coordinator.leave(0, 0)
    bench.join(1)
    assert (bench.ask(1).lease.start, bench.coordinator.counters.wasted_steps) == (held.start, 0)


def test_another_data_set_is_the_users_error():
    bench = Bench()
    bench.join(0)
    with pytest.raises(UserError, match="Every worker must see the same data"):
        bench.join(1, data=DataSpec(size=9))
    with pytest.raises(UserError, match="2 files here, 8 samples there"):
        bench.join(1, data=DataSpec(files=("a", "b")))


@pytest.mark.parametrize("seen", [("a", "b", "c", "d"), ("a",), ("b", "c")])
@pytest.mark.parametrize("later", ["joins", "resumes", "begins from it"])
def test_the_job_keeps_its_first_list_of_files_whatever_others_see(caplog, seen, later):
    data = DataSpec(files=("a", "b", "c"), validation=True)
    bench = Bench()
    bench.join(0, data=data)
    first = bench.ask(0).lease
    bench.push(0, first, 2)
    if later != "joins":
        saved, copy = bench.coordinator.dump(), bench.shard.copy()
        bench = Bench(boot=2, epoch=1)
        bench.shard.restore(copy, other_run=later != "resumes")
        bench.coordinator.load(saved, other_run=later != "resumes")
        bench.now = 100.0
    bench.join(1, data=DataSpec(files=seen, callbacks=True))
    bench.join(2, data=DataSpec(files=seen, callbacks=True))
    bench.now += 100.0
    assert bench.coordinator.data == DataSpec(files=data.files, callbacks=True)
    given = {bench.ask(1).lease.file, bench.ask(1).lease.file}
    assert given <= set(data.files)
    told = [record.message for record in caplog.records if "files of training data" in record.message]
    new, missing = len(set(seen) - set(data.files)), len(set(data.files) - set(seen))
    assert len(told) == 1
    assert f"{new} of them are new, and {missing} of the job's 3 are missing" in told[0]


def test_a_task_whose_worker_is_lost_goes_to_another():
    bench = Bench()
    for slot in (0, 1):
        bench.join(slot)
    first = bench.train(0)
    assert bench.ask(1).kind == "idle"
    bench.coordinator.leave(0, 0)
    second = bench.ask(1)
    assert (second.task, second.token == first.token) == ("export", False)
    assert bench.coordinator.task_done(TaskDone(slot=1, incarnation=0, token=first.token)) is None


def test_a_snapshot_holds_everything():
    bench = Bench(validation=True)
    bench.join(0)
    lease = bench.ask(0).lease
    bench.push(0, lease, lease.stop)
    saved = bench.coordinator.dump()
    other = Bench(validation=True)
    other.coordinator.load(saved)
    assert other.coordinator.dump() == saved
    assert other.coordinator.counters.steps == 1


def test_a_position_that_is_pushed_twice_is_counted_in_its_range():
    bench = Bench()
    bench.join(0)
    lease = bench.ask(0).lease
    bench.push(0, lease, lease.stop)
    bench.push(0, lease, lease.stop)
    counters = bench.coordinator.counters
    assert (counters.repeated, counters.steps) == (2, 2)
    assert counters.repeated_ranges == {(0, lease.start // 2)}


def test_a_journal_brings_the_snapshots_ledger_to_the_moment_of_the_copy():
    old = Bench()
    old.join(0)
    lease = old.ask(0).lease
    old.push(0, lease, lease.stop)
    saved, copy = old.coordinator.dump(), old.shard.copy()
    lease = old.ask(0).lease
    old.push(0, lease, lease.stop)
    old.push(0, lease, lease.stop)
    newest = old.shard.pull(0, aligned(4))

    new = Bench()
    new.shard.restore(copy)
    new.coordinator.load(saved)
    assert new.shard.hello(0, 0, MODEL, newest.version).wants_copy
    new.shard.offer(0, 0, newest.version, newest.meta, aligned(4))
    assert new.coordinator.ledger.done_samples == 4
    counters = new.coordinator.counters
    assert (counters.steps, counters.repeated) == (3, 2)
    assert new.shard.journal.since(-1).entries == old.shard.journal.since(1).entries


def test_who_got_no_answer_is_given_the_same_again():
    bench = Bench()
    bench.join(0)
    first = bench.ask(0, number=1)
    assert bench.ask(0, number=1) == first
    assert len(bench.coordinator.ledger.leases) == 1
    second = bench.ask(0, number=2)
    assert second.lease.token != first.lease.token
    bench.finish(0, first.lease)
    bench.finish(0, second.lease)
    number = 3
    while (given := bench.ask(0, number=number)).kind == "data":
        bench.finish(0, given.lease)
        number += 1
    assert given.task == "export"
    assert bench.ask(0, number=number) == given
    assert bench.ask(0, number=number + 1).kind == "idle"


def test_what_is_somebody_elses_by_now_is_not_given_again():
    bench = Bench()
    bench.join(0)
    bench.join(1)
    given = bench.ask(0, number=1)
    bench.coordinator.leave(0, 0)
    assert bench.ask(1, number=1).lease.start == given.lease.start
    bench.join(0)
    assert bench.ask(0, number=1).lease.start != given.lease.start


def test_who_has_said_goodbye_is_given_nothing():
    bench = Bench()
    bench.join(0)
    bench.coordinator.leave(0, 0)
    assert bench.ask(0).kind == "idle"
    bench.join(0)
    assert bench.ask(0).kind == "data"


# --- another process, another run ---------------------------------------------------------------------------------


def test_a_coordinator_that_is_started_again_in_place_gives_no_token_twice():
    """A container that ended is started again under the same epoch; a worker that survived has its leases still."""
    old, new = Bench(), Bench(boot=2)
    old.join(0)
    saved = old.coordinator.dump()
    held = [old.ask(0).lease for _ in range(2)]
    new.coordinator.load(saved)
    answer = new.join(0, held=tuple(held))
    assert [one.old for one in answer.renamed] == [lease.token for lease in held]
    new.now += 60.0
    others = []
    while (given := new.ask(0)).kind == "data":
        others.append(given.lease)
    tokens = [one.new for one in answer.renamed] + [lease.token for lease in others]
    assert len(set(tokens) | {lease.token for lease in held}) == len(tokens) + len(held)
    assert sorted(lease.start for lease in [*held, *others]) == [0, 2, 4, 6]


def test_what_nobody_claims_after_a_restart_in_place_is_free_again():
    old, new = Bench(), Bench(boot=2)
    old.join(0)
    old.ask(0)
    new.coordinator.load(old.coordinator.dump())
    new.join(1)
    new.now += 60.0
    new.coordinator.tick()
    assert new.train(1).task == "export"


def test_another_run_begins_without_what_the_first_ones_workers_held_or_why_it_ended():
    first, second = Bench(stop=StopAfter(steps=1)), Bench(boot=2, stop=StopAfter(epochs=2))
    for slot in (0, 1):
        first.join(slot)
    lease = first.ask(0).lease
    first.coordinator.stopping = "1 steps are done"
    second.coordinator.load(first.coordinator.dump(), other_run=True)
    assert lease.token in first.coordinator.ledger.leases
    assert not second.coordinator.gathering
    second.join(0)
    assert second.train(0).task == "export"
    assert second.coordinator.ledger.completed == 2


def test_one_that_follows_another_before_the_first_snapshot_of_a_run_that_began_with_another_one():
    """What the workers' copies bring is counted, and what they hold is theirs before anybody asks."""
    first, lost, new = Bench(), Bench(boot=2), Bench(boot=3, epoch=1)
    first.join(0)
    for bench in (lost, new):
        bench.shard.restore(first.shard.copy(), other_run=True)
        bench.coordinator.load(first.coordinator.dump(), other_run=True)
    assert not lost.coordinator.gathering
    lost.join(0)
    lost.now += 10.0
    lease, held = lost.ask(0).lease, lost.ask(0).lease
    lost.finish(0, lease)
    meta = lost.shard.pull(0, copy := aligned(4)).meta
    assert new.coordinator.gathering
    assert new.shard.hello(0, 0, MODEL, copy_version=1).wants_copy
    new.shard.offer(0, 0, 1, meta, copy)
    answer = new.join(0, held=(held,))
    new.join(1)
    assert [one.old for one in answer.renamed] == [held.token]
    assert new.coordinator.ledger.counts() == (2, 2)
    assert new.ask(1).kind == "idle"
    new.now += 60.0
    new.coordinator.heartbeat(0, 0)
    starts = []
    while (given := new.ask(1)).kind == "data":
        starts.append(given.lease.start)
    assert sorted([lease.start, held.start, *starts]) == [0, 2, 4, 6]
    assert new.coordinator.counters.repeated == 0


def test_a_metric_that_is_not_finite_is_left_out_and_reaches_no_target():
    bench = Bench(stop=StopAfter(epochs=1, metric="loss", value=0.9), validation=True)
    bench.join(0)
    given = bench.train(0)
    done = TaskDone(
        slot=0, incarnation=0, token=given.token, metrics={"val_loss": math.nan, "val_accuracy": 0.5}
    )
    bench.coordinator.task_done(TaskDone.model_validate_json(done.to_json()))  # JSON has no NaN
    assert bench.coordinator.tasks.history[0]["val_accuracy"] == 0.5
    assert "val_loss" not in bench.coordinator.tasks.history[0]
    assert bench.ask(0).task == "export"
    assert bench.coordinator.status().message == ""


def test_what_a_worker_says_with_its_heartbeats_is_in_the_status_until_it_says_it_no_more():
    bench = Bench()
    bench.join(0)
    for message in ("cannot read s3://bucket/part-3: no answer", ""):
        bench.coordinator.heartbeat(0, 0, message)
        assert [worker.message for worker in bench.coordinator.status().workers] == [message]


def test_the_newest_of_every_slot_are_told_first():
    members = [Member(slot, incarnation) for slot in range(3) for incarnation in range(slot + 1)]
    told = [(m.slot, m.incarnation) for m in report.newest_first(members)]
    assert told == [(0, 0), (1, 1), (2, 2), (1, 0), (2, 1), (2, 0)]
