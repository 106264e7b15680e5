"""A real worker in a thread."""

import math
import threading

import pytest

from shoal_trainer.worker.compose import build_flat_model, compose

SECONDS = 120
on_host = pytest.mark.parametrize("engine", ["host"], indirect=True)
"""For a test of what XLA does otherwise; see `MATRIX` in conftest.py."""


class Running:
    """A worker in a thread."""

    def __init__(self, training, servers, coordinator, **config):
        config = servers.config(**config)
        self.drain = threading.Event()
        self.flat_model = build_flat_model(training, config)
        self.flat_model.trace()  # as `main` does
        self.worker = compose(training, config, self.flat_model, coordinator, servers.credentials, self.drain)
        self.end = None
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self):
        try:
            self.end = self.worker.loop.run()
        except Exception as error:
            self.end = error

    def start(self):
        self.thread.start()
        return self

    def never_idle(self, steps=math.inf):
        """Wait for each of the first `steps` batches, however late the feed is: an idle worker pushes what it has."""
        loop = self.worker.loop
        get = loop._feed.get
        loop._feed.get = lambda timeout: get(SECONDS if loop.steps < steps else timeout)

    def join(self):
        self.thread.join(SECONDS)
        assert not self.thread.is_alive(), "the worker did not end"
        self.worker.close()
        return self.end


def wait(coordinator, condition):
    with coordinator.pushed:
        assert coordinator.pushed.wait_for(condition, SECONDS)
