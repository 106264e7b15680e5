"""The training data that a job accepts from its workers."""

import pytest

from shoal_trainer.coordinator.file_list import LIST_SECONDS
from shoal_trainer.coordinator.protocol import SHORT_LIST, DataSpec, FileEnded
from shoal_trainer.errors import Unreachable, UserError
from tests.unit.trainer.coordinator.bench import Bench


def test_different_data_set_is_a_user_error():
    bench = Bench(workers=1)
    with pytest.raises(UserError, match="Every worker must see the same data"):
        bench.join(1, data=DataSpec(size=9))
    with pytest.raises(UserError, match="2 files here, 8 samples there"):
        bench.join(1, data=DataSpec(files=("a", "b")))


@pytest.mark.parametrize("seen", [("a", "b", "c", "d"), ("a",), ("b", "c")])
@pytest.mark.parametrize("later", ["joins", "resumes", "begins from it"])
def test_job_keeps_its_first_file_list(caplog, seen, later):
    data = DataSpec(files=("a", "b", "c"), validation=True)
    bench = Bench()
    bench.join(0, data=data)
    first = bench.ask(0).lease
    bench.push(0, first, 2)
    if later != "joins":
        saved, copy = bench.coordinator.record.dump(), bench.shard.copy()
        bench = Bench(boot=2, epoch=1)
        bench.shard.restore(copy, other_run=later != "resumes")
        bench.coordinator.load(saved, other_run=later != "resumes")
        bench.now = 100.0
    bench.join(1, data=DataSpec(files=seen, callbacks=True))
    bench.join(2, data=DataSpec(files=seen, callbacks=True))
    bench.now += 100.0
    bench.coordinator.tick()  # the shard is ready, and survivors have a moment to join
    bench.now += 10.0
    assert bench.coordinator.record.data == DataSpec(files=data.files, callbacks=True)
    leased = {bench.ask(1).lease.file, bench.ask(1).lease.file}
    assert leased <= set(data.files)
    messages = [record.message for record in caplog.records if "files of training data" in record.message]
    new, missing = len(set(seen) - set(data.files)), len(set(data.files) - set(seen))
    assert len(messages) == 1
    assert f"{new} of them are new, and {missing} of the job's 3 are missing" in messages[0]


LONG = DataSpec(files=tuple(f"s3://bucket/part-{number:06}" for number in range(SHORT_LIST // 16)))


def test_a_short_list_is_left_out_of_no_join():
    data = DataSpec(files=("a", "b"))
    assert data.brief() is data
    assert len(LONG.brief().to_json()) < 220
    assert LONG.brief().digest == LONG.digest != data.digest
    assert LONG.brief().amount == LONG.amount


def test_one_worker_at_a_time_is_asked_for_a_long_list():
    bench = Bench()
    assert bench.join(0, data=LONG.brief()).wants_files
    with pytest.raises(Unreachable, match="another worker is sending the list"):
        bench.join(1, data=LONG.brief())
    assert bench.join(0, data=LONG.brief()).wants_files  # the answer was lost
    assert bench.coordinator.record.data is None
    assert not bench.join(0, data=LONG).wants_files
    assert bench.coordinator.record.data == LONG
    for slot in range(1, 100):
        assert not bench.join(slot, data=LONG.brief()).wants_files
    assert bench.ask(99).lease.file in LONG.files


def test_a_worker_that_was_asked_and_is_lost_keeps_no_other_one_out():
    bench = Bench()
    assert bench.join(0, data=LONG.brief()).wants_files
    bench.now += LIST_SECONDS
    assert bench.join(1, data=LONG.brief()).wants_files


def test_a_restarted_coordinator_asks_for_no_list_that_its_snapshot_has():
    first = Bench()
    first.join(0, data=LONG)
    bench = Bench(boot=2, epoch=1)
    bench.shard.restore(first.shard.copy())
    bench.coordinator.load(first.coordinator.record.dump())
    for slot in range(100):
        assert not bench.join(slot, data=LONG.brief()).wants_files


def test_another_long_list_is_asked_for_once_to_say_how_it_differs(caplog):
    bench = Bench()
    bench.join(0, data=LONG)
    other = DataSpec(files=(*LONG.files, "one-more"))
    assert bench.join(1, data=other.brief()).wants_files
    assert not bench.join(1, data=other).wants_files
    assert not bench.join(2, data=other.brief()).wants_files
    [message] = [record.message for record in caplog.records if "files of training data" in record.message]
    assert "1 of them are new, and 0 of the job's" in message


def test_a_long_list_is_not_asked_for_where_the_job_has_none():
    bench = Bench(workers=1)
    with pytest.raises(UserError, match="4,096 files here, 8 samples there"):
        bench.join(1, data=LONG.brief())


ORDER = DataSpec(size=8, order="Arrays() with the seed 0", probes=(1.0, -250.0))


@pytest.mark.parametrize("later", ["joins", "resumes", "begins from it"])
@pytest.mark.parametrize(
    ("seen", "error"),
    [
        (
            {"order": "Arrays() with the seed 1"},
            "another order than the job: Arrays.. with the seed 1 here, Arrays.. with",
        ),
        ({"probes": (2.0, -250.0)}, "random_state=0"),
        ({"probes": (1.0,)}, "random_state=0"),
        ({"probes": (1.0001, -250.0002)}, ""),
        ({"order": "", "probes": ()}, ""),
    ],
)
def test_a_worker_with_other_samples_at_a_position_is_a_user_error(seen, error, later):
    """They would be trained twice, and others never, while the counters say: each once."""
    bench = Bench()
    bench.join(0, data=ORDER)
    bench.push(0, bench.ask(0).lease, 2)
    if later != "joins":
        saved, bench = bench.coordinator.record.dump(), Bench(boot=2, epoch=1)
        bench.coordinator.load(saved, other_run=later != "resumes")
    data = ORDER.model_copy(update=seen)
    if not error:
        bench.join(1, data=data)
        return
    with pytest.raises(UserError, match=error):
        bench.join(1, data=data)


def test_a_run_that_begins_with_the_end_of_another_one_may_have_another_order():
    bench = Bench()
    bench.join(0, data=ORDER)
    saved = bench.coordinator.record.dump()
    bench = Bench(boot=2, epoch=1)
    bench.coordinator.load(saved, other_run=True)
    other = ORDER.model_copy(update={"order": "Arrays() with the seed 1", "probes": (5.0, 6.0)})
    bench.join(0, data=other)
    with pytest.raises(UserError, match="another order"):
        bench.join(1, data=ORDER)


def test_a_snapshot_of_an_earlier_version_takes_the_order_of_the_first_worker():
    bench = Bench()
    bench.join(0, data=DataSpec(size=8))
    bench.join(1, data=ORDER)
    with pytest.raises(UserError, match="another order"):
        bench.join(2, data=ORDER.model_copy(update={"order": "Arrays() with the seed 1"}))


def test_files_without_a_sample_are_a_user_error():
    bench = Bench()
    bench.join(0, data=DataSpec(files=("a", "b")))
    tokens = [bench.ask(0).lease.token for _ in range(2)]
    bench.coordinator.file_ended(FileEnded(slot=0, incarnation=0, token=tokens[0], length=0))
    with pytest.raises(UserError, match="Every file of the training data is empty"):
        bench.coordinator.file_ended(FileEnded(slot=0, incarnation=0, token=tokens[1], length=0))
