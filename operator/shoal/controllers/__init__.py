"""The controllers, a folder for each kind: observe, plan, apply, report. Decisions are in `shoal.policy`."""
