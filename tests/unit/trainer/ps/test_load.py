"""The counters of a shard's work."""

from shoal_trainer.ps.load import Load


def test_threads_that_work_at_once_are_not_busier_than_the_clock() -> None:
    now = [0.0]
    load = Load(lambda: now[0])
    first, second = load.working(), load.working()
    first.__enter__()
    now[0] = 2.0
    second.__enter__()
    now[0] = 3.0
    first.__exit__(None, None, None)
    now[0] = 5.0
    second.__exit__(None, None, None)
    now[0] = 9.0
    with load.working():
        now[0] = 10.0
    assert load.busy_seconds == 6.0


def test_work_that_fails_counts_as_time_but_as_no_update() -> None:
    now = [0.0]
    load = Load(lambda: now[0])
    try:
        with load.working():
            now[0] = 1.0
            raise ValueError
    except ValueError:
        pass
    assert (load.busy_seconds, load.updates) == (1.0, 0)
    load.applied(8, 1)
    assert (load.updates, load.bytes_received) == (1, 8)


def test_a_server_that_never_rests_is_seen_to_be_busy() -> None:
    """Threads that take turns without a gap: a server at its limit, which is when its capacity is learned."""
    now = [0.0]
    load = Load(lambda: now[0])
    running = load.working()
    running.__enter__()
    for _ in range(10):
        now[0] += 1.0
        following = load.working()
        following.__enter__()
        running.__exit__(None, None, None)
        running = following
        load.applied(1, 1)
    assert load.busy_seconds == load.updates == 10
