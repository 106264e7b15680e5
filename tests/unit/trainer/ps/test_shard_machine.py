"""Any order of pushes, resends, replacements, crashes and restores."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from dev.night import examples
from shoal_trainer.contract import Staleness
from shoal_trainer.errors import Fenced
from shoal_trainer.ps.shard import AppliedPush, ShardCopy, ShardStore, State
from tests.unit.trainer.ps.shards import MODEL, ONE, Clock, grad, push_to, read


class ShardMachine(RuleBasedStateMachine):
    """Pushes, resends, replaced workers, crashes and restores, against a list of applied pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.log: list[tuple[int, int, int]] = []
        self.newest = dict.fromkeys(range(3), 0)
        self.seqs: dict[tuple[int, int], int] = {}
        self.snapshot: tuple[ShardCopy, list[tuple[int, int, int]]] | None = None
        self.shard = self.start(0)

    def start(self, epoch: int) -> ShardStore:
        def on_applied(push: AppliedPush) -> None:
            self.log.append((push.slot, push.incarnation, push.seq))

        in_full = Staleness(policy="Constant")  # so that the parameters count pushes
        return ShardStore(0, 1, epoch, staleness=in_full, clock=self.clock, on_applied=on_applied)

    def hello(self, slot: int) -> None:
        self.shard.workers.connect(slot, self.newest[slot])
        self.shard.hello(slot, self.newest[slot], MODEL)
        self.clock.now += 10
        self.shard.offer(slot, self.newest[slot], grad(0.0))

    @rule(slot=st.integers(0, 2))
    def push(self, slot: int) -> None:
        self.hello(slot)
        identity = slot, self.newest[slot]
        self.seqs[identity] = self.seqs.get(identity, 0) + 1
        push_to(self.shard, *identity, self.seqs[identity], self.shard.history.version, ONE, grad(-1.0))

    @rule(slot=st.integers(0, 2), back=st.integers(0, 3))
    def resend(self, slot: int, back: int) -> None:
        identity = slot, self.newest[slot]
        seq = self.seqs.get(identity, 0) - back
        if seq >= 1 and seq <= self.shard.history.applied.get(identity, 0):
            self.hello(slot)
            before = self.shard.history.version
            push_to(self.shard, *identity, seq, self.shard.history.version, ONE, grad(-1.0))
            assert self.shard.history.version == before

    @rule(slot=st.integers(0, 2))
    def replace(self, slot: int) -> None:
        self.newest[slot] += 1
        self.hello(slot)
        with pytest.raises(Fenced):
            push_to(self.shard, slot, self.newest[slot] - 1, 1_000_000, 0, ONE, grad(-1.0))

    @rule()
    def save(self) -> None:
        copy = self.shard.copy()
        self.snapshot = None if copy is None else (copy, list(self.log))

    @rule()
    def crash(self) -> None:
        self.shard = self.start(self.shard.epoch + 1)
        self.log.clear()
        if self.snapshot is not None:
            self.shard.restore(self.snapshot[0])
            self.log.extend(self.snapshot[1])
        for identity in self.seqs:
            self.seqs[identity] = self.shard.history.applied.get(identity, 0)

    @invariant()
    def every_push_is_in_the_parameters_exactly_once(self) -> None:
        assert len(set(self.log)) == len(self.log)
        if self.shard.state is State.READY:
            np.testing.assert_array_equal(read(self.shard), len(self.log))
            assert self.shard.history.version == len(self.log)
            for (slot, incarnation), seq in self.shard.history.applied.items():
                assert seq == max(s for a, b, s in self.log if (a, b) == (slot, incarnation))


TestShardMachine = ShardMachine.TestCase
TestShardMachine.settings = settings(max_examples=examples(40), stateful_step_count=25, deadline=None)
