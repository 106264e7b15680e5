"""The controller of TrainingJobs: observe, plan, apply, report. All decisions are in `shoal.policy`."""
