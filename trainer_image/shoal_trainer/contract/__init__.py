"""The contract between the operator and the trainer: what the operator imports of the trainer (and `script`).

What goes in: `configuration`, `stopping`. What comes out: `status` with its `sums`, and at the end `ending`. Both sides
know `places` and `credentials`. It imports nothing heavy.

The two images are upgraded independently, so unknown keys are ignored: either side may add fields. Times are in
seconds, sizes in bytes and counts in samples unless a name says otherwise.
"""

from __future__ import annotations

from shoal_trainer.contract.configuration import (
    BATCH_SIZE,
    AcceleratorBatch,
    InitialFrom,
    JobIdentity,
    Role,
    RuntimeConfig,
    Shard,
    SnapshotPolicy,
    Staleness,
)
from shoal_trainer.contract.credentials import job_key, status_token
from shoal_trainer.contract.ending import FAILURE_REASONS, Outcome, Ranges, TerminationMessage
from shoal_trainer.contract.figures import (
    LARGEST,
    MOST_FLOPS,
    MOST_LOG,
    MOST_METRICS,
    MOST_SHORT,
    MOST_TEXT,
    Amount,
    Count,
    Figure,
    Metrics,
    Number,
    Text,
    plain,
)
from shoal_trainer.contract.message import Message, Model, lean
from shoal_trainer.contract.places import (
    ACCELERATORS_ENV,
    CODE_ARCHIVE,
    CODE_DIR,
    CONFIG_ENV,
    CONTROL_PORT,
    DATA_PORT,
    EPOCH_LINE,
    EXIT_DRAINED,
    EXIT_FENCED,
    EXIT_OK,
    EXIT_USER,
    HISTORY,
    METRICS_PORT,
    SECRET_DIR,
    STATUS_PATH,
    STORAGE_DIR,
    code_name,
)
from shoal_trainer.contract.status import (
    MAX_EPOCHS,
    MAX_SHARDS,
    MAX_WORKERS,
    DataReport,
    EpochReport,
    ModelReport,
    Phase,
    ShardReport,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.contract.stopping import AT_MOST_ONE, FALLS, RISES, StopAfter, names_of
from shoal_trainer.contract.sums import MAX_SPEEDS, BesideSums, LogSums, SpeedSums, Sums
