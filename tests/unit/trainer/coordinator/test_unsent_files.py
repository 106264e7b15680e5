"""Who may write files of callbacks: never two workers, whatever happens in which order, and nobody beside an export."""

import json

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
                assert task is None or tasks.sender in {None, worker}
                assert task is None or task.kind != "export" or tasks.sender is None
            case "done", _ if tasks.holder is not None:
                tasks.done(tasks.queue[0].token, {}, now)
            case "says", worker, names, called:
                held = tasks.queue[0] if tasks.queue else None
                others = held is not None and held.kind != "evaluate" and held.holder not in {None, worker}
                accepted = tasks.sends_later(worker, names, called)
                assert not (accepted and others)
                if accepted:
                    assert {name for name, who in tasks.missing.items() if who == worker} == names
                    assert tasks.sender == (worker if names else None)
                else:
                    assert names <= tasks.missing.keys()
            case "lost", worker:
                unsent = {name for name, who in tasks.missing.items() if who == worker}
                assert tasks.release(worker) == sorted(unsent)
                assert tasks.sender != worker
                assert unsent <= tasks.missing.keys()
            case "left out", name:
                sender = tasks.missing.get(name)
                tasks.leave_out({name: "why"})
                assert tasks.missing[name] == (sender if isinstance(sender, tuple) else "why")
            case "waits", seconds:
                now += seconds
            case "restart", _:
                saved, before, tasks = json.loads(json.dumps(tasks.dump())), tasks, Tasks()
                tasks.load(saved)
                assert tasks.sender is None
                assert tasks.missing.keys() == before.missing.keys()
                assert tasks.left_out == before.left_out
        assert len({who for who in tasks.missing.values() if isinstance(who, tuple)}) < 2
        if tasks.sender is not None and tasks.queue:
            assert tasks.awaited(now) in {tasks.sender, tasks.queue[0].holder}


def test_no_more_than_a_few_names_are_told():
    tasks = Tasks()
    tasks.sends_later((0, 0), [f"logs/{n}.keras" for n in range(5)])
    tasks.release((0, 0))
    assert tasks.lacking == (
        "logs/0.keras, logs/1.keras, logs/2.keras and 2 more went with the worker that had written them, before the "
        "storage took them"
    )
    another = Tasks()
    another.load(tasks.dump())
    assert another.lacking == tasks.lacking
    another.resume_after(0)
    assert another.lacking == "", "these files are of the run that it starts from"
    tasks.sends_later((1, 0), [f"logs/{n}.keras" for n in range(5)])
    assert tasks.lacking == ""
    tasks.sends_later((1, 0), [])
    assert tasks.missing == {}
