"""The configuration of a pod, of which a test names what it means."""

from pathlib import Path
from typing import Any

from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, Shard
from shoal_trainer.security import create_secret_dir

JOB = JobIdentity(namespace="n", name="j", uid="u")


def pod_config(role: Role = Role.WORKER, folder: Path | None = None, **fields: Any) -> RuntimeConfig:
    """`folder`: that of the job's secret and storage; None: it has neither."""
    if folder is not None:
        if not (folder / "secret").exists():
            create_secret_dir(folder / "secret")
        fields |= {"storage_uri": (folder / "storage").as_uri(), "secret_dir": str(folder / "secret")}
    given = {
        "job": JOB, "index": 0, "incarnation": 0, "parameter_servers": (Shard(host="127.0.0.1", data_port=1),),
        "entrypoint": "a:b", "storage_uri": "file:///nowhere", "bind_host": "127.0.0.1", **fields,
    }  # fmt: skip
    return RuntimeConfig(role=role, **given)
