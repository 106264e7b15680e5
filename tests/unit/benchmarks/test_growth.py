import random

import pytest

from benchmarks.growth import Reading, judge

HOUR = 3600
SURVIVORS = {"ps-1-0", "worker-2-0"}


def life(seconds=HOUR, memory_rate=0.0, descriptor_rate=0.0, thread_rate=0.0, seed=0):
    """Readings each second from an age of 75 s on: noise, a warm process, and growth per second."""
    rng = random.Random(seed)
    return [
        Reading(
            age=age,
            memory=380e6 + rng.uniform(-5e6, 5e6) + memory_rate * age,
            descriptors=12 + rng.randint(-2, 2) + int(descriptor_rate * age),
            threads=15 + rng.randint(-2, 2) + int(thread_rate * age),
        )
        for age in range(75, seconds)
    ]


def judged(worker, **others):
    readings = {"ps-1-0": life(seed=1), "worker-2-0": worker, **others}
    return judge(readings, SURVIVORS, HOUR)


def test_noise_passes_and_survivors_come_first():
    lives, reasons = judged(life(), **{"worker-0-7": life(320), "worker-1-3": life(90)})
    assert reasons == []
    assert [one.name for one in lives] == ["ps-1-0", "worker-2-0", "worker-0-7"]
    assert [one.survivor for one in lives] == [True, True, False]


@pytest.mark.parametrize(
    ("leak", "quantity"),
    [
        ({"memory_rate": 10e6 / 300}, "memory"),
        ({"memory_rate": 2e6 / 300}, "memory"),
        ({"descriptor_rate": 8 / HOUR}, "descriptors"),
        ({"thread_rate": 8 / HOUR}, "threads"),
    ],
)
def test_leak_of_a_survivor_fails(leak, quantity):
    lives, reasons = judged(life(**leak))
    assert [one.name for one in lives if one.grew] == ["worker-2-0"]
    assert len(reasons) == 1
    assert reasons[0].startswith(f"worker-2-0: {quantity} ")


def test_survivor_that_was_replaced_or_never_read_fails():
    assert judged(life(1800))[1] == ["worker-2-0 was not killed, but was last read at 1799 s of 3600 s"]
    assert judged([])[1] == ["worker-2-0 was not killed, but was last read at 0 s of 3600 s"]


def test_shorter_life_that_doubles_fails():
    _, reasons = judged(life(), **{"worker-0-7": life(320, memory_rate=400e6 / 320)})
    assert [reason.partition(":")[0] for reason in reasons] == ["worker-0-7"]
