"""Telemetry: what a job's coordinator tells, and what Shoal tells Prometheus."""
