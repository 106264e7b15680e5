"""The loop from measurements to plans: custom resources become the planner's values, its answers become proposals."""
