"""The coordinator: the part of parameter server 0 that owns the data ledger, the tasks and the job's telemetry."""
