"""A worker's leases: marks, renames, and what a rollback drops."""

from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.wire.messages import Progress, Push, PushMeta
from shoal_trainer.worker.leases import Leases, joined
from shoal_trainer.worker.work import DataWork


def push(seq, *marks):
    return Push(seq, (0,), PushMeta(1, progress=marks))


def test_lease_is_held_until_its_last_sample_is_applied():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 32))
    first, second = leases.mark((0, 1), 16), leases.mark((0, 1), 32)
    leases.answered(push(1, first))
    assert leases.held() == {(0, 1): DataWork((0, 1), 0, 16, 32)}
    leases.answered(push(2, second))
    assert leases.held() == {}


def test_renamed_lease_is_found_under_its_old_tokens():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 32))
    assert leases.mark((0, 1), 8) == Progress(0, -1, 0, 8)
    leases.rename([(0, 1)], {(0, 1): (1, 5)})
    leases.rename([(1, 5)], {(1, 5): (2, 7)})
    assert leases.token((0, 1)) == (2, 7)
    assert leases.mark((0, 1), 16) == Progress(0, -1, 8, 16)


def test_reassigned_lease_is_dropped():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 32))
    leases.grant(DataWork((0, 2), 0, 32, 64))
    leases.rename([(0, 1), (0, 2)], {(0, 2): (1, 1)})
    assert leases.mark((0, 1), 16) is None
    assert list(leases.held()) == [(1, 1)]


def test_lease_granted_during_a_join_is_kept():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 32))
    presented = leases.held()
    leases.grant(DataWork((1, 2), 0, 32, 64))
    leases.rename(presented.keys(), {(0, 1): (1, 1)})
    assert leases.token((1, 2)) == (1, 2)
    assert list(leases.held()) == [(1, 1), (1, 2)]


def test_a_lease_has_more_until_the_batches_that_end_it_are_read():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 32))
    leases.mark((0, 1), 8)
    assert leases.unread({(0, 1): 16})
    assert not leases.unread({(0, 1): 32})
    leases.rename([(0, 1)], {(0, 1): (1, 5)})
    assert not leases.unread({(0, 1): 32})
    leases.grant(DataWork((1, 6), 0, 64, 96))
    assert leases.unread({(0, 1): 32})
    leases.mark((1, 6), 96)
    assert not leases.unread({(0, 1): 32})
    leases.grant(DataWork((1, 7), 0, 0, None, file="a.csv"))
    assert leases.unread({(0, 1): 32, (1, 7): 1000})


def test_lost_pushes_are_counted_once():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 64))
    for seq in (1, 2, 3):
        leases.answered(push(seq, leases.mark((0, 1), 16 * seq)))
    assert leases.lost(2) == 1
    assert leases.lost(2) == 0


def test_adjacent_marks_are_joined():
    marks = [
        Progress(0, -1, 0, 8),
        None,
        Progress(0, -1, 8, 16),
        Progress(0, -1, 32, 40),
        Progress(1, -1, 40, 48),
    ]
    assert joined(marks) == (Progress(0, -1, 0, 16), Progress(0, -1, 32, 40), Progress(1, -1, 40, 48))


def test_mark_over_adjacent_leases_ends_them_all():
    leases = Leases()
    for n in range(3):
        leases.grant(DataWork((0, n), 0, 64 * n, 64 * n + 64))
    leases.answered(push(1, *joined(leases.mark((0, n), 64 * n + 64) for n in range(2))))
    assert leases.held() == {(0, 2): DataWork((0, 2), 0, 128, 192)}


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.permutations(range(6)),
    st.lists(st.integers(1, 9), min_size=1, max_size=60),
)
def test_held_leases_are_what_no_answered_push_covers(sizes, order, pushes):
    leases, work = Leases(), []
    for n in (n for n in order if n < len(sizes)):  # adjacent or not
        start = sum(sizes[:n])
        work.append(DataWork((0, n), 0, start, start + sizes[n]))
        leases.grant(work[-1])
    batches = [(one.token, end) for one in work for end in range(one.start + 1, one.stop + 1)]
    rest = {position for one in work for position in range(one.start, one.stop)}
    for seq, count in enumerate(pushes):
        marks = joined(leases.mark(*batch) for batch in batches[:count])
        del batches[:count]
        leases.answered(push(seq, *marks))
        for mark in marks:
            rest -= set(range(mark.start, mark.stop))
        held = [set(range(one.start, one.stop)) for one in leases.held().values()]
        assert all(held)
        assert sum(map(len, held)) == len(rest)
        assert set().union(*held) == rest


def test_rollback_drops_leases_and_refuses_older_grants():
    leases = Leases()
    leases.grant(DataWork((0, 1), 0, 0, 32))
    leases.answered(push(1, leases.mark((0, 1), 16)))
    leases.reset(1)
    assert leases.token((0, 1)) is None
    assert leases.lost(0) == 0  # the coordinator counts the pushes that the rollback undid
    leases.grant(DataWork((0, 2), 0, 32, 64))
    assert leases.held() == {}
    leases.grant(DataWork((0, 3), 0, 32, 64, generation=1))
    assert leases.token((0, 3)) == (0, 3)


def test_lease_granted_before_the_stop_is_refused_when_it_arrives_late():
    leases = Leases()
    leases.grant(DataWork((7, 1), 0, 0, 8))
    leases.void(7)
    leases.grant(DataWork((7, 2), 0, 8, 16))
    assert leases.held() == {}
    leases.grant(DataWork((8, 1), 0, 0, 8))  # of another coordinator process
    assert set(leases.held()) == {(8, 1)}


def test_rollback_undoes_a_stop():
    leases = Leases()
    leases.void(7)
    leases.reset(1)
    leases.grant(DataWork((7, 1), 0, 0, 32, generation=1))
    assert leases.stopped is None
    assert list(leases.held()) == [(7, 1)]


def test_a_lease_is_revoked_by_its_end_but_not_by_its_completion():
    leases = Leases()
    works = [DataWork((0, number), 0, 8 * number, 8 * number + 8) for number in range(4)]
    for work in works[:3]:
        leases.grant(work)
    leases.answered(push(1, leases.mark(works[0].token, 8)))
    assert leases.token(works[0].token) is None
    leases.rename([works[1].token, works[2].token], {works[1].token: (1, 9)})
    assert [leases.revoked(work) for work in works] == [False, False, True, False]
    leases.void(1)
    assert leases.revoked(works[1])
    leases.void(0)
    leases.reset(1)
    assert all(leases.revoked(work) for work in works)
