"""What a worker knows of a shard's pushes from answers that have only what is new is what the shard knows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from shoal_trainer.ps.followed import Followed
from shoal_trainer.wire.encoding import decode_answer, encode_answer
from shoal_trainer.wire.messages import Entry, Journal, PushMeta
from tests.unit.trainer.ps.shards import N, grad, pull_from, push_to, ready

SLOTS = 3
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("push"), st.integers(1, SLOTS)),
        st.tuples(st.just("replace"), st.integers(1, SLOTS)),
        st.tuples(st.just("pull"), st.just(0)),
        st.tuples(st.just("snapshot"), st.integers(0, 3)),
    ),
    max_size=60,
)


@given(events=EVENTS)
def test_copy_names_all_pushes_that_answers_have_told_of(events: list[tuple[str, int]]) -> None:
    shard, out = ready(), grad(0.0)
    incarnations, seqs = dict.fromkeys(range(1, SLOTS + 1), 0), dict.fromkeys(range(1, SLOTS + 1), 0)
    answer = pull_from(shard, 0, out)
    followed = Followed(answer.meta)
    for event, number in events:
        if event == "replace":
            incarnations[number] += 1
            seqs[number] = 0
        elif event == "push":
            seqs[number] += 1
            worker = number, incarnations[number]
            push_to(shard, *worker, seqs[number], shard.history.version, PushMeta(1), grad(1.0))
        elif event == "snapshot":  # of a state some pushes ago
            shard.history.journal.published(max(0, shard.history.version - number))
        else:
            answer = pull_from(shard, 0, out, known=answer.version)
            followed.follow(decode_answer(encode_answer(answer.meta)))
            known = followed.complete(answer.meta)
            assert known.applied == shard.history.applied
            assert known.journal == shard.history.journal.since(-1)


def test_answer_to_a_worker_that_follows_is_as_long_as_what_is_new() -> None:
    """Not as what all workers of the job have pushed."""
    shard, out = ready(), grad(0.0, N)
    shard.history.applied = {(slot, incarnation): 9 for slot in range(1000) for incarnation in range(4)}
    shard.history.version = 1
    first = pull_from(shard, 0, out).meta
    push_to(shard, 7, 5, 1, 1, PushMeta(1), grad(1.0))
    later = pull_from(shard, 0, out, known=1).meta
    assert len(encode_answer(first)) > 4000 * 16
    assert len(encode_answer(later)) < 200
    followed = Followed(first)
    followed.follow(later)
    assert followed.complete(later).applied == shard.history.applied
    assert later.journal == Journal(0, (Entry(2, 7, 5, 1, 1, 0, -1, 0, 0),))
