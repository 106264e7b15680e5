"""Whose turn it is to be left one node more, of the jobs whose pods the API server refuses: pure.

Such a job has the nodes of its pods only, and tries one more where a pool has room. Where all nodes are planned for
others, it could never show that its pods are admitted again. So plans leave one node of a pool to one of these jobs at
a time: to the namespaces in turn, and to the jobs of each in turn. However many there are, others lack that node only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime

from shoal.sizing.fleet import FleetJob

TURN_SECONDS = 600.0
"""So long takes a plan, a worker that leaves, and a try of what is tried seldom."""


def with_turn(fleet: Sequence[FleetJob], now: datetime) -> list[FleetJob]:
    """The jobs, of which one may have one node more in each pool where it is kept to what it has."""
    refused: dict[str, list[str]] = {}
    for name in sorted(job.name for job in fleet if job.kept_to):
        refused.setdefault(name.partition("/")[0], []).append(name)
    if not refused:
        return list(fleet)
    turn, at = divmod(int(now.timestamp() / TURN_SECONDS), len(refused))
    theirs = refused[sorted(refused)[at]]
    chosen = theirs[turn % len(theirs)]
    return [
        replace(job, kept_to={pool: count + 1 for pool, count in job.kept_to.items()})
        if job.name == chosen
        else job
        for job in fleet
    ]
