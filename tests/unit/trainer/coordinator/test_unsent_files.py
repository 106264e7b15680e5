"""Who may write files of callbacks: never two workers, whatever happens in which order, and nobody beside an export."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.coordinator.task_queue import RESERVED_SECONDS, Tasks

WORKERS = [(0, 0), (1, 0), (2, 0)]
EPOCHS = 3
NAMES = st.frozensets(st.sampled_from(["logs/a", "logs/b"]))
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("epoch"), st.booleans()),
        st.tuples(st.just("asks"), st.sampled_from(WORKERS)),
        st.tuples(st.just("done"), st.booleans()),
        st.tuples(st.just("says"), st.sampled_from(WORKERS), NAMES, st.none() | st.integers(0, EPOCHS)),
        st.tuples(st.just("left out"), st.sampled_from(["logs/a", "logs/b"])),
        st.tuples(st.just("lost"), st.sampled_from(WORKERS)),
        st.tuples(st.just("waits"), st.just(RESERVED_SECONDS)),
        st.tuples(st.just("restart"), st.just(0)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_one_worker_writes_and_none_beside_an_export(events):
    tasks, now, tokens, epochs = Tasks(), 0.0, 0, 0
    for event in events:
        match event:
            case "epoch", validation if epochs < EPOCHS:
                tasks.epoch_ended(epochs, {"loss": 1.0}, now, validation=validation, callbacks=True)
                epochs += 1
                if epochs == EPOCHS:
                    tasks.export(EPOCHS - 1)
            case "asks", worker:
                tokens += 1
                task = tasks.grant(worker, (1, tokens), now)
                assert task is None or tasks.files.sender in {None, worker}
                assert task is None or task.kind != "export" or tasks.files.sender is None
            case "done", _ if tasks.holder is not None:
                tasks.done(tasks.queue[0].token, {}, now)
            case "says", worker, names, called:
                held = tasks.queue[0] if tasks.queue else None
                others = held is not None and held.kind != "evaluate" and held.holder not in {None, worker}
                accepted = tasks.sends_later(worker, names, called)
                assert not (accepted and others)
                if accepted:
                    assert {name for name, who in tasks.files.missing.items() if who == worker} == names
                    assert tasks.files.sender == (worker if names else None)
                else:
                    newest = len(tasks.complete()) - 1
                    said = newest if called is None else min(newest, called)
                    known = names - tasks.files.missing.keys()
                    assert all(tasks.files.epoch(name) >= said for name in known)
            case "lost", worker:
                unsent = {name for name, who in tasks.files.missing.items() if who == worker}
                assert tasks.release(worker) == sorted(unsent)
                assert tasks.files.sender != worker
                assert unsent <= tasks.files.missing.keys()
            case "left out", name:
                sender = tasks.files.missing.get(name)
                tasks.leave_out({name: "why"})
                assert tasks.files.missing[name] == (sender if isinstance(sender, tuple) else "why")
            case "waits", seconds:
                now += seconds
            case "restart", _:
                saved, before, tasks = json.loads(json.dumps(tasks.dump())), tasks, Tasks()
                tasks.load(saved)
                assert tasks.files.sender is None
                assert tasks.files.missing.keys() == before.files.missing.keys()
                assert tasks.files.left_out == before.files.left_out
        assert len({who for who in tasks.files.missing.values() if isinstance(who, tuple)}) < 2
        if tasks.files.sender is not None and tasks.queue:
            assert tasks.awaited(now) in {tasks.files.sender, tasks.queue[0].holder}


def test_no_more_than_a_few_names_are_told():
    tasks = Tasks()
    tasks.sends_later((0, 0), [f"logs/{n}.keras" for n in range(5)])
    tasks.release((0, 0))
    assert tasks.files.lacking == (
        "logs/0.keras, logs/1.keras, logs/2.keras and 2 more went with the worker that had written them, before the "
        "storage took them"
    )
    another = Tasks()
    another.load(tasks.dump())
    assert another.files.lacking == tasks.files.lacking
    another.resume_after(0)
    assert another.files.lacking == "", "these files are of the run that it starts from"
    tasks.sends_later((1, 0), [f"logs/{n}.keras" for n in range(5)])
    assert tasks.files.lacking == ""
    tasks.sends_later((1, 0), [])
    assert tasks.files.missing == {}


A, B, C = WORKERS
F = "logs/best_weights.npz"


def ran(tasks, epoch, worker, stores=()):
    """This worker has run the callbacks of an epoch, and stored these files."""
    tasks.epoch_ended(epoch, {"loss": 1.0}, 0.0, validation=False, callbacks=True)
    assert tasks.grant(worker, (1, epoch), RESERVED_SECONDS) is not None
    for name in stores:
        tasks.stores(worker, (1, epoch), name)
    assert tasks.done((1, epoch), {}, 0.0)


def restarted(tasks):
    again = Tasks()
    again.load(json.loads(json.dumps(tasks.dump())))
    return again


@pytest.mark.parametrize("later", ["joins", "after a third worker", "after a second restart"])
def test_older_copy_is_not_lost_where_the_storage_has_a_newer_file(later):
    tasks = Tasks()
    ran(tasks, 0, A)
    assert tasks.sends_later(A, [F], 0, {F: 0})
    tasks = restarted(tasks)
    ran(tasks, 1, B, stores=[F])
    if later == "after a third worker":
        tasks.release(B)
        ran(tasks, 2, C)
    elif later == "after a second restart":
        tasks = restarted(tasks)
    tasks.joins(A, [F], 0, {F: 0})
    assert tasks.files.missing == {}


def test_what_a_worker_gave_up_since_the_snapshot_stays_lost():
    tasks = Tasks()
    ran(tasks, 0, A, stores=[F])
    ran(tasks, 1, A)
    assert tasks.sends_later(A, [F], 1, {F: 1})
    tasks = restarted(tasks)
    tasks.joins(A, [], 1, {F: 1})
    assert tasks.files.missing == {F: ""}


WHY = "the worker cannot read it"


@pytest.mark.parametrize("said", [{F: 0}, {F: 1}, {F: 9}, {}])
def test_what_a_worker_has_left_out_is_no_news_of_a_newer_file(said):
    """It says so again with each of its tasks. An earlier version does not say of which epoch its file is."""
    tasks = Tasks()
    ran(tasks, 0, A)
    tasks.leave_out({F: WHY}, {F: 0})
    assert tasks.files.missing == {F: WHY}
    ran(tasks, 1, B, stores=[F])
    tasks.leave_out({F: WHY}, said)
    assert tasks.files.missing == ({} if said in ({F: 0}, {F: 1}) else {F: WHY})


def test_what_a_worker_has_left_out_says_nothing_of_a_newer_file_that_is_lost():
    tasks = Tasks()
    ran(tasks, 0, A)
    ran(tasks, 1, B)
    assert tasks.sends_later(B, [F], 1, {F: 1})
    tasks.release(B)
    tasks.leave_out({F: WHY}, {F: 0})
    assert tasks.files.missing == {F: ""}
    tasks.leave_out({F: WHY}, {F: 1})
    assert tasks.files.missing == {F: WHY}


def test_what_is_left_out_of_epochs_that_a_rollback_undoes_holds_back_no_later_file():
    tasks = Tasks()
    ran(tasks, 0, A)
    tasks.leave_out({F: WHY}, {F: 7})
    ran(tasks, 1, B)
    assert tasks.sends_later(B, [F], 1, {F: 1})
    assert tasks.files.sender == B


def test_files_of_epochs_that_a_rollback_undoes_hold_back_no_later_ones():
    tasks = Tasks()
    ran(tasks, 0, A)
    saved = tasks.dump()
    for epoch in (1, 2):
        ran(tasks, epoch, A, stores=[F])
    tasks.load(saved)
    tasks.epoch_ended(1, {"loss": 1.0}, 0.0, validation=False, callbacks=True)
    assert tasks.grant(A, (2, 1), 0.0)
    assert tasks.sends_later(A, [F], 1, {F: 1})
    assert tasks.files.sender == A


@pytest.mark.parametrize("then", ["its worker leaves", "restart"])
def test_copy_of_an_attempt_that_did_not_count_replaces_no_file_of_the_same_epoch(then):
    """Parameter server 0 restarted while its files waited, and another worker ran these callbacks again."""
    tasks = Tasks()
    ran(tasks, 0, A)
    saved = tasks.dump()
    tasks.epoch_ended(1, {"loss": 1.0}, 0.0, validation=False, callbacks=True)
    assert tasks.grant(A, (1, 1), 0.0)
    assert tasks.sends_later(A, [F], 1, {F: 1})
    tasks = Tasks()
    tasks.load(saved)
    ran(tasks, 1, B, stores=[F])
    if then == "restart":
        tasks = restarted(tasks)
    else:
        tasks.release(B)
    tasks.joins(A, [F], 1, {F: 1})
    assert tasks.files.missing == {}


def test_copy_of_an_epoch_that_is_undone_replaces_no_file_of_the_newest_one():
    """A restart from an older snapshot: its epoch is to come again, and the file of the newest one is stored."""
    tasks = Tasks()
    ran(tasks, 0, A)
    saved = tasks.dump()
    ran(tasks, 1, A)
    ran(tasks, 2, A)
    assert tasks.sends_later(A, [F], 2, {F: 2})
    tasks = Tasks()
    tasks.load(saved)
    ran(tasks, 1, B, stores=[F])
    tasks.release(B)
    tasks.joins(A, [F], 2, {F: 2})
    assert tasks.files.missing == {}


def test_what_is_given_up_takes_the_place_of_no_file_of_the_same_epoch():
    """Why another one is missing stays known, and that its worker may have sent it since."""
    tasks = Tasks()
    ran(tasks, 0, A)
    tasks.leave_out({F: WHY}, {F: 0})
    tasks.joins(B, [], 0, {F: 0})
    assert tasks.files.missing == {F: WHY}
    tasks = Tasks()
    ran(tasks, 0, A)
    assert tasks.sends_later(A, [F], 0, {F: 0})
    tasks = restarted(tasks)
    tasks.joins(B, [], 0, {F: 0})
    tasks.joins(A, [], 0, {})
    assert tasks.files.missing == {}


def test_a_worker_of_an_earlier_version_is_told_that_all_its_copies_are_overtaken():
    """It drops them all with the first that is."""
    tasks = Tasks()
    ran(tasks, 0, A)
    ran(tasks, 1, B, stores=[F])
    tasks.release(B)
    assert not tasks.sends_later(A, [F, "logs/log.csv"], 0)
    assert tasks.files.missing == {"logs/log.csv": ""}
    assert tasks.sends_later(A, [F, "logs/log.csv"], 0, {F: 0, "logs/log.csv": 0})
    assert tasks.files.missing == {"logs/log.csv": A}
