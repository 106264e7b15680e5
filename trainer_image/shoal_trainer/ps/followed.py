"""What a worker knows of the pushes in a shard's parameters, as of the last answer: for its copy of them.

An answer has what has changed since the one before; all of it would be a hundred kilobytes with every push to a job of
a thousand workers.
"""

from __future__ import annotations

from shoal_trainer.ps.history import pushed
from shoal_trainer.ps.journal import PushJournal
from shoal_trainer.wire.messages import AnswerMeta


class Followed:
    """Of one shard, from the first answer of a connection on, which is complete."""

    def __init__(self, first: AnswerMeta) -> None:
        self._journal = PushJournal(first.journal.floor)
        self._applied = dict(first.applied)

    def follow(self, answer: AnswerMeta) -> None:
        """Take over the next answer."""
        if answer.applied:
            self._applied = dict(answer.applied)
        else:
            for entry in answer.journal.entries:
                pushed(self._applied, (entry.slot, entry.incarnation), entry.seq)
        self._journal.follow(answer.journal)

    def complete(self, answer: AnswerMeta) -> AnswerMeta:
        """The last answer, with all that was said before."""
        return answer._replace(journal=self._journal.since(-1), applied=dict(self._applied))
