"""Telemetry: reads reports of coordinators, and exports metrics of the operator."""
