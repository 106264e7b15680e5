"""Pure decisions about one job: an `Observation` in, a `Plan` out. No I/O and no clock.

`plan.plan` is the entry point; each policy is a module of its own.
"""
