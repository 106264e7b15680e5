"""18 minutes of 16 workers, with a slack that is shorter than the start of a node."""

from __future__ import annotations

from shoal.sizing.fleet import FleetJob, FleetPool, LogMean, Model, Pace, Profile, Row, ServerLoad

MODEL = Model("replayed", 8e8, 10**6, 60)
ROW = Row("T4", batch_size=128, workers=4, compute=LogMean.of(0.1, 0.005, 1000))
PROFILE = Profile(MODEL, (ROW,), {1: ServerLoad(0.6, 600_000)})
STEADY = FleetPool("steady", "T4", limit=16, price_per_hour=3.0)
SURE = Pace(0.0, 1e5)
JOB = FleetJob(
    "a", ("spot", "steady"), model=MODEL, samples_left=1080 * 16 / 0.1 * 128, batch_size=128, max_workers=16,
    zone_policy="Any", deadline_seconds=1386.0, pace_before=SURE,
)  # fmt: skip
