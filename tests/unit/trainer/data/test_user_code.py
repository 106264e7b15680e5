"""Errors of the user's code name the file, line and function of that code."""

import json
import re
import sysconfig

import numpy as np
import pytest
import tensorflow as tf

from shoal_trainer.data.user_code import where


def caught(call):
    with pytest.raises(Exception) as error:
        call()
    return where(error.value)


def place(function):
    return rf" \(tests/unit/trainer/data/test_user_code.py:\d+ in {function}\)$"


@pytest.fixture(autouse=True)
def _in_repository(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)


def load(text):
    return json.loads(text)


def test_error_inside_a_library_names_the_users_line():
    assert re.search(r"^JSONDecodeError: Expecting value.*" + place("load"), caught(lambda: load("nonsense")))


def test_mapped_function_names_its_line_when_it_is_traced():
    def parse(_number):
        return {"image": 1}["label"]

    text = caught(lambda: tf.data.Dataset.range(3).map(parse))
    assert re.search(r"^KeyError: 'label'" + place("parse"), text)


def test_mapped_function_names_its_line_when_it_runs():
    def look_up(number):
        return np.float32({0: 1.0}[int(number)])

    rows = tf.data.Dataset.range(3).map(lambda number: tf.numpy_function(look_up, [number], tf.float32))
    assert re.search(r"KeyError: 1" + place("look_up"), caught(lambda: list(rows)))


def test_generator_names_its_line():
    def rows():
        yield 1
        raise ValueError("no more")

    dataset = tf.data.Dataset.from_generator(rows, output_signature=tf.TensorSpec((), tf.int32))
    assert re.search(r"no more" + place("rows"), caught(lambda: list(dataset)))


def test_file_outside_the_working_directory_has_its_full_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert f"({__file__}:" in caught(lambda: load("nonsense"))


def test_error_without_user_code_has_no_location():
    assert where(ValueError("wrong")) == "ValueError: wrong"


def test_launcher_of_a_command_is_not_the_users_code():
    launcher = compile("1 / 0", f"{sysconfig.get_path('scripts')}/shoal-trainer", "exec")
    with pytest.raises(ZeroDivisionError) as caught:
        exec(launcher)
    assert "shoal-trainer" not in where(caught.value)
