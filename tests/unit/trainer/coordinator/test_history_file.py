"""`logs/history.csv`: complete epochs, also after a rollback and while the storage does not answer."""

import threading

from shoal_trainer.coordinator.epoch_history import EpochHistory, as_csv
from shoal_trainer.coordinator.task_queue import Tasks
from shoal_trainer.errors import Unreachable


class Storage:
    def __init__(self, failures=0):
        self.failures, self.written, self.wrote = failures, [], threading.Event()

    def write(self, name, chunks, confirm):
        confirm()
        if self.failures:
            self.failures -= 1
            raise Unreachable("no answer")
        assert name == "logs/history.csv"
        self.written.append(b"".join(chunks).decode())
        self.wrote.set()

    def await_write(self):
        assert self.wrote.wait(10)
        self.wrote.clear()
        return self.written[-1]


FIRST, SECOND = {"loss": 2.0, "val_loss": 3.0}, {"loss": 1.5}


def test_complete_epochs_are_written_and_those_of_a_rollback_taken_back():
    storage = Storage()
    file = EpochHistory(storage, lambda: None)
    file.start()
    file.update([FIRST])
    assert storage.await_write() == "epoch,loss,val_loss\n0,2.0,3.0\n"
    file.update([FIRST, SECOND])
    assert storage.await_write() == "epoch,loss,val_loss\n0,2.0,3.0\n1,1.5,\n"
    file.update([FIRST])
    assert storage.await_write() == "epoch,loss,val_loss\n0,2.0,3.0\n"
    file.close(10)
    assert len(storage.written) == 3


def test_an_update_before_the_thread_runs_is_written():
    storage = Storage()
    file = EpochHistory(storage, lambda: None)
    file.update([FIRST])
    file.start()
    assert storage.await_write() == "epoch,loss,val_loss\n0,2.0,3.0\n"
    file.close(10)


def test_a_process_without_epochs_keeps_the_file_of_the_one_before_it():
    """Parameter server 0, restarted after the model was published, knows no epoch."""
    storage = Storage()
    file = EpochHistory(storage, lambda: None)
    file.start()
    file.update([])
    file.close(10)
    assert storage.written == []


def test_an_outage_of_the_storage_is_waited_for_and_the_end_writes_the_last_state():
    storage = Storage(failures=1)
    file = EpochHistory(storage, lambda: None)
    file.start()
    file.update([FIRST])
    assert storage.await_write().endswith("0,2.0,3.0\n")
    file.update([FIRST, SECOND])
    file.close(10)
    assert storage.written[-1].endswith("1,1.5,\n")


def test_a_long_file_is_not_written_after_each_epoch_but_at_the_end():
    """One of 10,000 epochs takes 0.1 s of the server's core."""
    storage, now = Storage(), [0.0]
    file = EpochHistory(storage, lambda: now.__setitem__(0, now[0] + 5.0), clock=lambda: now[0])
    file.start()
    file.update([FIRST])
    storage.await_write()
    file.update([FIRST, SECOND])
    assert not storage.wrote.wait(0.05)
    file.close(5)
    assert storage.written[-1].endswith("1,1.5,\n")


def test_a_run_without_epochs_has_a_header():
    assert as_csv([]) == "epoch\n"


def test_complete_epochs_are_told_without_a_copy_and_do_not_change_later():
    """Under the lock, with all epochs of the run."""
    tasks = Tasks()
    tasks.epoch_ended(0, {"loss": 2.0}, 0.0, validation=False, callbacks=False)
    before = tasks.complete()
    tasks.epoch_ended(1, {"loss": 1.5}, 0.0, validation=True, callbacks=False)
    tasks.grant((0, 0), (1, 1), 0.0)
    tasks.done((1, 1), {"val_loss": 3.0}, 0.0)
    after, saved = tasks.complete(), tasks.dump()["history"]
    assert (before, after) == ([{"loss": 2.0}], [{"loss": 2.0}, {"loss": 1.5, "val_loss": 3.0}])
    tasks._add(0, {"late": 1.0})
    assert before[0] is after[0] is saved[0]
    assert before[0] == {"loss": 2.0}
