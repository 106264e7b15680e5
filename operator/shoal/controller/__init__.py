"""The controller: observe, plan, apply, report. Thin; every decision is in `shoal.policy`."""
