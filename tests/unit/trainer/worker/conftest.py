"""Starts parameter servers and closes them after the test."""

import pytest

from tests.unit.trainer.worker.fakes import Servers


@pytest.fixture
def start_servers(tmp_path):
    made = []

    def make(coordinator, **options):
        servers = Servers(tmp_path / f"secret{len(made)}", coordinator, **options)
        made.append(servers)
        return servers

    yield make
    for servers in made:
        servers.close()
