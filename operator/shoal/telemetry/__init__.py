"""Telemetry: reads the reports of coordinators, of few jobs every 2 s and of very many less often."""
