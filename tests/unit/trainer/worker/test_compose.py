import pytest

from shoal_trainer import Indexed, Training
from shoal_trainer.contract import JobIdentity, Role, RuntimeConfig, Shard
from shoal_trainer.errors import Unreachable
from shoal_trainer.worker.compose import build_glue
from tests.unit.trainer.worker.models import functional


def test_data_that_are_away_at_the_start_are_nobodys_mistake():
    def away(*_):
        raise Unreachable("the store does not answer")

    config = RuntimeConfig(
        job=JobIdentity(namespace="n", name="j", uid="uid"), role=Role.WORKER, index=0, incarnation=0,
        parameter_servers=(Shard(host="127.0.0.1", data_port=1),), entrypoint="a:b", batch_size=4,
        storage_uri="file:///nowhere",
    )  # fmt: skip
    with pytest.raises(Unreachable):
        build_glue(Training(model=functional, data=Indexed(size=8, fn=away)), config)
