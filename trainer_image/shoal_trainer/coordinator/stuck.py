"""Workers that hold leases and train nothing of them, though they are heard. Pure.

One reads nothing: its storage hangs, or a function of the user never returns. Another is cut off from a parameter
server that others reach: its local steps are used up, and it waits.

Such a worker sends heartbeats, so it is not silent, and it cannot know whether others wait for its leases. So it is
fenced as a silent one is: what it pushes later is refused, another worker trains its ranges, and a new process takes
its place. It is waited for longer unless others are idle: while these train on, little is lost, and if it is alone, or
nobody reads anything, nobody else could have read sooner. Where the next one hangs as well, the data are at fault:
after each time the patience doubles, until a push arrives.

Of an outage only the time counts in which others have reached the servers again and again. So a server that is lost
fences nobody, and when it is back, those that are late to notice have all their time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from shoal_trainer.coordinator.members import Member

LEAST_SECONDS = 600.0
FIRST_SECONDS = 3600.0
"""If nobody is idle, or before the first push to this process: until then nobody knows how long a read takes."""
FACTOR = 3.0
"""It is stuck after so many times the longest read that has ended, and the least time."""
TOLD_SECONDS = 600.0
GAP_SECONDS = 60.0
"""If nobody is known to have reached the servers for longer (and for `FACTOR` pushes), they may have been away."""


class Stuck:
    """Finds them in what the heartbeats say. `least`, `first`: seconds, see `LEAST_SECONDS` and `FIRST_SECONDS`."""

    def __init__(self, least: float = LEAST_SECONDS, first: float = FIRST_SECONDS) -> None:
        self._least, self._first = least, first
        self._longest = 0.0
        """Of the reads that have ended, in seconds."""
        self._pushed = False
        self._in_vain = 0
        """How many were fenced since the last push."""
        self._suspects: list[Member] = []
        """The result of the last `notice`; some may have read since."""
        self._told = "", 0.0
        self._reached, self._reached_since = -math.inf, math.inf
        """When a worker last reached the servers, and since when that was never long ago."""

    def patience(self, *, idle: bool) -> float:
        """Seconds after which a worker that reads nothing is stuck; `idle`: others wait for its leases."""
        least = self._least if idle and self._pushed else self._first
        return max(least, FACTOR * self._longest) * 2.0**self._in_vain

    def heard(self, member: Member, reading: float, outage: float, now: float) -> None:
        """A heartbeat says for how long this worker has read nothing, and not reached all servers.

        Of a read only the time without a push counts, of an outage that in which others reached them.
        """
        member.outage_seconds = outage
        cut_off = self._reached - max(self._reached_since, now - outage)
        reading = min(reading, now - member.last_push)
        if reading < member.reading_seconds:
            self._longest = max(self._longest, member.reading_seconds)
        member.reading_seconds = reading
        member.stuck_seconds = max(reading, cut_off, 0.0)

    def pushed(self, member: Member, now: float) -> None:
        """A push of this worker was applied."""
        self.heard(member, 0.0, member.outage_seconds, now)
        self._pushed, self._in_vain = True, 0
        self.reaches(member, now)

    def reaches(self, member: Member, now: float) -> None:
        """This worker reaches all servers, unless it says otherwise: it pushes, or is idle and probes them."""
        if member.outage_seconds:
            return
        if now - self._reached > max(GAP_SECONDS, FACTOR * (member.push_seconds or 0.0)):
            self._reached_since = now
        self._reached = now

    def notice(self, members: Iterable[Member]) -> None:
        """Look at all members; called by the timer."""
        self._suspects = [member for member in members if self._hangs(member, idle=True)]

    def found(self, *, idle: bool) -> list[Member]:
        """The workers that are stuck, the one that has been so longest first."""
        stuck = [member for member in self._suspects if self._hangs(member, idle=idle)]
        return sorted(stuck, key=lambda member: -member.stuck_seconds)

    def taken(self, member: Member, now: float, *, idle: bool) -> str:
        """Its leases are taken back; returns why."""
        what = "did not reach a parameter server" if member.outage_seconds else "read nothing"
        why = f"{what} for {member.stuck_seconds:.0f} s{' while others were idle' if idle else ''}"
        self._told = f"worker {member.slot}-{member.incarnation} {why}: its ranges went to others", now
        self._in_vain += 1
        return why

    def message(self, now: float) -> str:
        """The last time, as long as it is news; "" if there is none."""
        said, at = self._told
        return said if now - at <= TOLD_SECONDS else ""

    def _hangs(self, member: Member, *, idle: bool) -> bool:
        return member.present and member.stuck_seconds > self.patience(idle=idle)
