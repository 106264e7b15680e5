"""The training data that a job accepts from its workers."""

import pytest

from shoal_trainer.coordinator.protocol import DataSpec
from shoal_trainer.errors import UserError
from tests.unit.trainer.coordinator.bench import Bench


def test_different_data_set_is_a_user_error():
    bench = Bench()
    bench.join(0)
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
