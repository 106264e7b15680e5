"""The loss of a parameter server, on real data in virtual time: workers' copies against the snapshot alone."""

import statistics

import pytest

from benchmarks.convergence import SHOAL, accuracy
from benchmarks.virtual_job import Job, VirtualJob, accuracy_after_loss


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [1, 4, 8])
def test_accuracy_from_copies_is_no_worse_than_from_the_snapshot(workers):
    """A quarter of the run lies between the snapshot and the loss; the samples are the same in all runs."""
    jobs = [Job("digits", workers, seed) for seed in range(5)]
    from_copies = [accuracy_after_loss(job, True) for job in jobs]
    from_snapshot = [accuracy_after_loss(job, False) for job in jobs]
    assert all(lost <= workers for lost, _ in from_copies)
    assert all(lost > 100 for lost, _ in from_snapshot)
    copies, snapshot = (statistics.mean(a for _, a in found) for found in (from_copies, from_snapshot))
    assert copies >= snapshot - 0.005
    assert copies >= statistics.mean(accuracy((SHOAL, job)) for job in jobs) - 0.01


def test_who_goes_on_alone_waits_for_none_of_those_that_left():
    run = VirtualJob(Job("digits", 8, 0))
    run.train(40)
    run.shrink(1)
    run.train(40)
    assert run.samples == 80 * run.job.batch
