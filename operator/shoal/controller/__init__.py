"""The controller: observe, plan, apply, report. All decisions are in `shoal.policy`."""
