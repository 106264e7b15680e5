"""Plans for all jobs that share capacity pools: what the operator runs once a minute, and `shoal plan` for files.

`plan_fleet` is a function of frozen values, and of the choices that it kept the last time, which save work. It needs
numpy only: nothing that it imports may import pandas, scipy, scikit-learn or matplotlib. What it imports is loaded with
the first plan: an operator whose jobs name no pools does without the 12 MiB.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.sizing.fleet.values import FleetJob, FleetPlan, FleetPool, JobPlan, Pace, Watched
from shoal.sizing.speed.measurements import Evaluation, LogMean, Model, Profile, Row, ServerLoad

__all__ = [
    "Evaluation",
    "FleetJob",
    "FleetPlan",
    "FleetPool",
    "JobPlan",
    "LogMean",
    "Model",
    "Pace",
    "Profile",
    "Row",
    "ServerLoad",
    "Watched",
    "plan_fleet",
]


if TYPE_CHECKING:
    from shoal.sizing.fleet.planner import plan_fleet
else:

    def plan_fleet(*args, **options):
        """See `shoal.sizing.fleet.planner.plan_fleet`."""
        from shoal.sizing.fleet import planner

        return planner.plan_fleet(*args, **options)
