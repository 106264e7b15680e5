"""Where operator and trainer find each other: variables, folders, ports, exit codes and a line of the log."""

from __future__ import annotations

CONFIG_ENV = "SHOAL_CONFIG"
"""The environment variable with a pod's `RuntimeConfig` as JSON."""
ACCELERATORS_ENV = "SHOAL_ACCELERATORS"
"""The environment variable with how many GPUs the limits of a worker's container have."""
SECRET_DIR = "/var/run/shoal/secret"
"""The mount path of the job's Secret: `key` (32 bytes), `key-id`, `tls.crt`, `tls.key`."""
STORAGE_DIR = "/var/run/shoal/storage"
"""The mount path of the job's volume claim or ephemeral volume; its URI is `file://` + this."""
CODE_DIR = "/var/run/shoal/code"
"""The mount path of the job's code from a ConfigMap, first on the path of workers."""
CODE_ARCHIVE = "code.zip"
"""The file in it that has packages and what is large; Python imports from it."""


def code_name(namespace: str, digest: str) -> str:
    """Where an archive that is larger than a ConfigMap lies in the job's storage. `digest`: its SHA-256 (hex)."""
    return f"{namespace}/code-{digest}.zip"


EPOCH_LINE = "epoch report: "
"""PS 0 logs each complete epoch in a line that ends in this and an `EpochReport` as JSON: the history of the job for
whoever may read logs. After a rollback an epoch may come again; the last line counts."""
HISTORY = "history.csv"
"""In `logs/` of a run: the metrics of its complete epochs, as Keras' `CSVLogger` writes them."""
DATA_PORT = 7070
CONTROL_PORT = 7071
METRICS_PORT = 7072
STATUS_PATH = "/v1/status"
"""GET over TLS on the control port of PS 0, with `Authorization: Bearer <status_token(key)>`."""
EXIT_OK = 0
EXIT_USER = 2
"""The user's code or configuration is wrong; a restart cannot help."""
EXIT_FENCED = 4
"""A newer incarnation has replaced this process, or its work went to others, since it was silent or stuck."""
EXIT_DRAINED = 143
"""The process stopped on SIGTERM. Not 0, which Kubernetes would count as success."""
