"""What is requested of an object store: the list of the files once, and of a file no more than is needed."""

import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import keras
import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer import Files, Training, UserError
from shoal_trainer.data import files as module
from shoal_trainer.data.source import Part
from shoal_trainer.worker.compose import build_flat_model
from shoal_trainer.worker.coordination import spec_of
from tests.unit.trainer.configs import pod_config
from tests.unit.trainer.data.records import parse, seen, write_records

RECORD = 16 + 1
"""Bytes of a record of one digit."""


class Store(ThreadingHTTPServer):
    """Files on loopback, with what was requested: (path, bytes sent)."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder, self.requests = folder, []

    @property
    def pattern(self):
        return f"http://127.0.0.1:{self.server_port}/data/*"

    def name(self, file):
        return self.pattern.replace("*", file)

    def of(self, file):
        return [sent for path, sent in self.requests if path == f"/data/{file}"]


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path.removeprefix("/data/")
        if name:
            body = (self.server.folder / name).read_bytes()
        else:
            body = "".join(f'<a href="{each.name}">' for each in self.server.folder.iterdir()).encode()
        part = re.match(r"bytes=(\d+)-(\d+)$", self.headers.get("Range", ""))
        if part:
            body = body[int(part[1]) : int(part[2]) + 1]
        self.server.requests.append((self.path, len(body)))
        self.send_response(206 if part else 200)
        self.send_header("Content-Length", len(body))
        self.end_headers()
        self.wfile.write(body)

    def do_HEAD(self):
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    for number in range(3):
        write_records(folder / f"part-{number}", [number] * 100)
    store = Store(folder)
    thread = threading.Thread(target=store.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield store
    store.shutdown()
    thread.join()
    store.server_close()


def model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def started(files):
    """As a worker starts, until it asks for its first lease."""
    job = Training(model=model, data=files)
    build_flat_model(job, pod_config(batch_size=8))
    assert [name.rpartition("/")[2] for name in spec_of(job).files] == ["part-0", "part-1", "part-2"]
    return job


def test_a_worker_that_starts_lists_the_files_once_and_reads_the_beginning_of_one(store, monkeypatch):
    monkeypatch.setattr(module, "HEAD", 50 * RECORD + 3)
    Files.tfrecord(store.pattern, parse).list()
    once = len(store.of(""))
    started(Files.tfrecord(store.pattern, parse))
    assert len(store.of("")) == 2 * once
    assert store.of("part-0") == [50 * RECORD + 3]
    assert store.of("part-1") == []


@pytest.mark.parametrize("compression", ["", "GZIP"])
def test_the_first_batch_is_the_same_from_a_beginning_and_a_lease_reads_it_all(
    store, monkeypatch, compression
):
    numbers = np.random.default_rng(0).integers(0, 10, 10_000)
    write_records(store.folder / "part-0", numbers, compression)
    files = Files.tfrecord(store.pattern, parse, compression=compression)
    monkeypatch.setattr(module, "HEAD", 2000)
    assert seen([files.example(8)]) == list(numbers[:8])
    assert store.of("part-0") == [2000]
    assert seen(files.read(Part(0, None, None, store.name("part-0")), 8)) == list(numbers)


def test_a_line_that_is_cut_off_is_in_no_batch(store, monkeypatch):
    (store.folder / "part-0").write_text("x,y\n" + "12,34\n" * 100)
    files = Files.csv(store.pattern, lambda x, y: (x, y), [np.int32, np.int32])
    monkeypatch.setattr(module, "HEAD", 4 + 6 * 8 + 1)
    assert seen([files.example(8)]) == [12] * 8
    assert store.of("part-0") == [4 + 6 * 8 + 1]


def test_where_the_beginning_is_too_short_the_whole_file_is_read(store, monkeypatch):
    monkeypatch.setattr(module, "HEAD", 7 * RECORD)
    assert seen([Files.tfrecord(store.pattern, parse).example(8)]) == [0] * 8
    write_records(store.folder / "part-0", [])
    assert seen([Files.tfrecord(store.pattern, parse).example(8)]) == [1] * 8


def test_the_function_of_a_user_gets_whole_files(store, monkeypatch):
    monkeypatch.setattr(module, "HEAD", 50 * RECORD)
    Files(store.pattern, lambda path: tf.data.TFRecordDataset(path).map(parse)).example(8)
    assert store.of("part-0") == [100 * RECORD]


def test_what_is_wrong_is_said_of_the_whole_file(store):
    (store.folder / "part-0").write_bytes(b"no record" * 100)
    with pytest.raises(UserError, match="part-0 cannot be read: corrupted record"):
        Files.tfrecord(store.pattern, parse).example(8)
