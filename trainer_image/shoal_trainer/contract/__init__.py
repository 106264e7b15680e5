"""The contract between the operator and the trainer: what the operator imports of the trainer (and `script`).

What goes in: `configuration`, `stopping`. What comes out: `status` with its `sums`, and at the end `ending`. Both sides
know `places` and `credentials`. It imports nothing heavy.

The two images are upgraded independently, so unknown keys are ignored: either side may add fields. Times are in
seconds, sizes in bytes and counts in samples unless a name says otherwise.
"""

from __future__ import annotations

from shoal_trainer.contract.configuration import (
    AcceleratorBatch,
    InitialFrom,
    JobIdentity,
    Role,
    RuntimeConfig,
    Shard,
    SnapshotPolicy,
    Staleness,
)
from shoal_trainer.contract.credentials import (
    job_key,
    status_token,
)
from shoal_trainer.contract.ending import (
    FAILURE_REASONS,
    Outcome,
    Ranges,
    TerminationMessage,
)
from shoal_trainer.contract.figures import (
    CENTURY,
    LARGEST,
    MOST_FLOPS,
    MOST_LOG,
    Amount,
    Count,
    Difference,
    Figure,
    Metrics,
    Number,
    UnixTime,
)
from shoal_trainer.contract.message import (
    VERSION,
    Message,
    Model,
    lean,
)
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
    METRICS_PORT,
    SECRET_DIR,
    STATUS_PATH,
    STORAGE_DIR,
    code_name,
)
from shoal_trainer.contract.status import (
    DataReport,
    EpochReport,
    ModelReport,
    Phase,
    ShardReport,
    StatusReport,
    WorkerReport,
    WorkerState,
)
from shoal_trainer.contract.stopping import (
    AT_MOST_ONE,
    FALLS,
    RISES,
    StopAfter,
    names_of,
)
from shoal_trainer.contract.sums import (
    MAX_SPEEDS,
    BesideSums,
    LogSums,
    MeasuredSums,
    PassedSums,
    SpeedSums,
    Sums,
)

__all__ = [
    "ACCELERATORS_ENV",
    "AT_MOST_ONE",
    "CENTURY",
    "CODE_ARCHIVE",
    "CODE_DIR",
    "CONFIG_ENV",
    "CONTROL_PORT",
    "DATA_PORT",
    "EPOCH_LINE",
    "EXIT_DRAINED",
    "EXIT_FENCED",
    "EXIT_OK",
    "EXIT_USER",
    "FAILURE_REASONS",
    "FALLS",
    "LARGEST",
    "MAX_SPEEDS",
    "METRICS_PORT",
    "MOST_FLOPS",
    "MOST_LOG",
    "RISES",
    "SECRET_DIR",
    "STATUS_PATH",
    "STORAGE_DIR",
    "VERSION",
    "AcceleratorBatch",
    "Amount",
    "BesideSums",
    "Count",
    "DataReport",
    "Difference",
    "EpochReport",
    "Figure",
    "InitialFrom",
    "JobIdentity",
    "LogSums",
    "MeasuredSums",
    "Message",
    "Metrics",
    "Model",
    "ModelReport",
    "Number",
    "Outcome",
    "PassedSums",
    "Phase",
    "Ranges",
    "Role",
    "RuntimeConfig",
    "Shard",
    "ShardReport",
    "SnapshotPolicy",
    "SpeedSums",
    "Staleness",
    "StatusReport",
    "StopAfter",
    "Sums",
    "TerminationMessage",
    "UnixTime",
    "WorkerReport",
    "WorkerState",
    "code_name",
    "job_key",
    "lean",
    "names_of",
    "status_token",
]
