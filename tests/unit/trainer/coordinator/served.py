"""A control server on loopback with handlers that tests control."""

import contextlib
import http.client
import io
import socket
import threading
import time

from shoal_trainer.contract import Phase, Shard, StatusReport
from shoal_trainer.coordinator.control_client import ControlClient
from shoal_trainer.coordinator.http import ControlServer
from shoal_trainer.coordinator.protocol import PURPOSE, Assignment, Done, Next
from shoal_trainer.errors import Unreachable
from shoal_trainer.security import create_secret_dir

SECONDS = 120


class Broken(io.BytesIO):
    """A file that cannot be read beyond a position."""

    def __init__(self, content, position):
        super().__init__(content)
        self.position = position

    def read(self, size=-1):
        if self.position is not None and self.tell() >= self.position:
            raise RuntimeError("the object store has lost it")
        return super().read(size)


class Served:
    """A control server whose requests raise `error` if set, and whose uploads go to `files`."""

    def __init__(self, folder, **options):
        self.credentials = create_secret_dir(folder)
        self.error = None
        self.files = {}
        self.content = b""
        """What downloads get; `broken`: where its reading fails."""
        self.broken = None
        self.cut = threading.Event()
        self.server = ControlServer(
            self.credentials,
            {"next": self.next, "heartbeat": self.heartbeat},
            host="127.0.0.1",
            status=lambda: StatusReport(job_uid="u", phase=Phase.TRAINING, step=7),
            upload=self.upload,
            download=self.download,
            **options,
        )
        self.server.start()
        self.address = Shard(host="127.0.0.1", control_port=self.server.port)

    def next(self, request):
        if self.error is not None:
            raise self.error
        return Assignment(kind="idle", seconds=request.slot)

    def heartbeat(self, request):
        return Done()

    def upload(self, slot, incarnation, token, name, chunks):
        if self.error is not None:
            raise self.error
        try:
            content = b"".join(chunks)
        except Unreachable:
            self.cut.set()
            raise
        self.files[slot, incarnation, token, name] = content

    @contextlib.contextmanager
    def download(self, slot, incarnation, token, name):
        if self.error is not None:
            raise self.error
        self.asked = slot, incarnation, token, name
        yield len(self.content), Broken(self.content, self.broken)

    def connect(self):
        plain = socket.create_connection(("127.0.0.1", self.server.port), SECONDS)
        return self.credentials.client_context().wrap_socket(plain, server_hostname="127.0.0.1")

    def ask(self, method, path, body=None, *, token=None, length=None):
        connection = http.client.HTTPSConnection(
            "127.0.0.1", self.server.port, timeout=SECONDS, context=self.credentials.client_context()
        )
        headers = {"Authorization": f"Bearer {token or self.credentials.token(PURPOSE)}"}
        if length is not None:
            headers["Content-Length"] = str(length)
        try:
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def works(self):
        client = ControlClient(self.address, self.credentials, timeout=SECONDS)
        try:
            return self.answer(client, 3) == 3
        finally:
            client.close()

    @staticmethod
    def answer(client, slot):
        """The server's answer; retries, because a slow machine may miss `proof_seconds`."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                return client.call("next", Next(slot=slot, incarnation=0, number=1), Assignment).seconds
            except Unreachable:
                if time.monotonic() > deadline:
                    raise
