"""The rhythm of a worker's exchanges: whether it takes part in rounds, and when it pulls just before its step ends.

Pure: times are the caller's, in seconds.
"""

from __future__ import annotations

import threading

from shoal_trainer.wire.messages import Pulled
from shoal_trainer.worker.exchange import Again

SMOOTHING = 0.2
"""The share of the newest time in a usual one."""
RESERVE = 0.1
"""Steps vary: the share of the time between two pushes by which the newest parameters are pulled earlier."""
CHEAP_SHARE = 0.03
"""A pull of this share is waited for if the step was faster than expected."""
PULL_SHARE = 0.1
"""The largest share of a pull in that time: it costs the servers as much as the push."""
STEADY = 8
"""After so many steps in a row that did not end early, a push is answered without parameters: those are pulled anew."""
ROUND_SHARE = 0.03
"""The largest share of an exchange in that time, where it is waited for."""


class Cadence:
    """Follows a worker's pushes. `rounds`: it may wait for others (`ps/rounds`); `sequential`: it waits for answers."""

    def __init__(self, *, rounds: bool, sequential: bool) -> None:
        self._rounds, self._sequential = rounds, sequential
        self.in_round = False
        """Whether the worker waits for the others after its pushes."""
        self._period: float | None = None
        """The usual time between two pushes."""
        self._exchange: float | None = None
        """How long an exchange usually delays the next step, or would in a round; without the wait for others."""
        self._pull = 0.0
        """The longest of the last pulls: where cores are shared, one takes several times as long as the next."""
        self._steady = 0
        """The last steps in a row of which none ended before the pull at its end was to begin."""
        self._after: float | None = None
        """When that was to begin, after the push before."""
        self._caution = 1
        """The worker takes part from when its exchange takes so many times less than it may."""
        self._live = 1

    @property
    def waits(self) -> bool:
        """Whether the next step begins after the answer to a push."""
        return self._sequential or self.in_round

    def pushes(self, period: float, busy: float, base: Pulled) -> None:
        """A push, `period` after the one before, is sent: decide whether it takes part in a round.

        `busy`: its steps, and the wait for their data. An exchange takes as long as a push and a pull, which slower
        workers may hold up, and in a round all of the period that is neither busy nor the wait for other workers. All
        workers push at once there, so it may take longer than before, and longer than it may. Then the worker takes
        part no more before it takes half as long; with other workers it tries anew.
        """
        seconds = (
            period - busy - base.wait_seconds
            if self.in_round
            else base.push_seconds + base.pull_seconds + base.wait_seconds
        )
        if self._after is not None:
            self._steady = 0 if busy < self._after else self._steady + 1
        self._after = None
        self._period = _mixed(self._period, period)
        self._exchange = _mixed(self._exchange, max(0.0, seconds))
        if base.live_workers != self._live:
            self._live, self._caution = base.live_workers, 1
        longest = ROUND_SHARE * self._period
        if self.in_round and self._exchange > longest:
            self.in_round, self._caution = False, 2 * self._caution
        elif self._caution * self._exchange <= longest:
            self.in_round = self._rounds
        self.in_round &= self._live > 1

    def again(self, base: Pulled, hurry: threading.Event) -> Again | None:
        """When to pull once more, just before the next step; None: not at all.

        Without it, a gradient would be as stale as twice as many workers make it. Only with other workers, and if a
        pull costs little of the time between two pushes. Where steps are steady, it is the only one.
        """
        assert self._period is not None
        self._pull = max(base.pull_seconds, (1 - SMOOTHING) * self._pull)
        if self._sequential or base.live_workers < 2 or base.pull_seconds > PULL_SHARE * self._period:
            return None
        self._after = after = (1 - RESERVE) * self._period - max(2 * base.pull_seconds, self._pull)
        cheap = base.pull_seconds <= CHEAP_SHARE * self._period
        return Again(after, hurry, cheap, answered=self._steady < STEADY)


def _mixed(usual: float | None, seconds: float) -> float:
    """The usual time with one more in it; a single long one counts little."""
    usual = usual or seconds
    return usual + SMOOTHING * (min(seconds, 2 * usual) - usual)
