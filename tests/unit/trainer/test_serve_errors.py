"""A parameter server survives errors of other processes."""

import pytest

from shoal_trainer.contract import Role, Shard
from shoal_trainer.serve import ParameterServer
from tests.unit.trainer.configs import pod_config


@pytest.fixture
def server(tmp_path):
    """PS `index` of two, not started."""
    two = (Shard(host="127.0.0.1"),) * 2
    return lambda index: ParameterServer(
        pod_config(Role.PS, tmp_path, index=index, parameter_servers=two, batch_size=2)
    )


def test_unexpected_error_in_the_final_snapshot_is_logged(server, monkeypatch, caplog):
    started = server(0)
    monkeypatch.setattr(started.service.snapshotter, "take", lambda: 1 / 0)
    started._final_snapshot()
    assert "cannot take a final snapshot" in caplog.text
