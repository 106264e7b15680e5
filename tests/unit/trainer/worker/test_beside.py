"""A worker's time beside its steps: in tasks, and without work. With the times of steps it is all of its time."""

from __future__ import annotations

from shoal_trainer.worker.beside import Beside, Passed
from shoal_trainer.worker.work import TaskWork
from tests.unit.trainer.worker.scripted import Bench


def test_a_task_that_runs_counts_so_far() -> None:
    beside = Beside()
    beside.task_begins(10.0)
    assert beside.passed(13.0) == Passed(3.0, 0.0)
    beside.task_ended(15.0)
    beside.waited(2.0)
    assert beside.passed(99.0) == Passed(5.0, 2.0)


def test_steps_and_what_passes_beside_them_are_all_of_the_time() -> None:
    """A step of 2 s, a task of 7 s, a step of 3 s, and 5 s without work."""
    bench = Bench()
    loop, pushes = bench.loop, []
    send = bench.server.push_pull

    def pushed(update, out, push, **more):
        pushes.append(push)
        return send(update, out, push, **more)

    bench.server.push_pull = pushed
    loop.upstream._exchange = bench.server
    loop._last_push = loop.upstream.last_answer = 0.0

    def step(start: int, at: float) -> None:
        bench.now = at
        loop._train(bench.batch(start))
        loop._flush()

    step(0, 2.0)
    loop._run_task = lambda _item: setattr(bench, "now", bench.now + 7.0)
    loop._handle(TaskWork((1, 2), "evaluate"))
    step(2, bench.now + 3.0)
    bench.leases.reset(0)
    loop.upstream.last_answer = bench.now = bench.now + 5.0
    loop._idle()
    assert loop.beside.passed(bench.now) == Passed(7.0, 5.0)
    assert sum(push.meta.timings.step for push in pushes) + 12.0 == bench.now == 17.0


def test_slow_data_are_the_time_of_a_step() -> None:
    """The worker holds a lease whose next batch is not there yet."""
    bench = Bench()
    bench.loop._last_push = 0.0
    bench.loop.upstream.last_answer = bench.now = 0.5
    bench.loop._idle()
    assert bench.loop.beside.passed(bench.now) == Passed()
    assert bench.loop._last_push == 0.0
