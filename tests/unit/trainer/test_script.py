"""Which Training of a file is meant, where nobody says it; the file is read and not run."""

from __future__ import annotations

import re

import pytest

from shoal_trainer.script import module_of, must_define, training_in

MADE = "Training(model=None, data=None)"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (f"from shoal_trainer import Training\nwork = {MADE}\n", "work"),
        (f"import shoal_trainer as s\nwork: object = s.{MADE}\n", "work"),
        (
            "from shoal_trainer import Training as T\nif True:\n    work = T(model=None, data=None)\n",
            "work",
        ),
        (f"def helper():\n    return 1\ndef work(rate):\n    return {MADE}\n", "work"),
        (f"def work():\n    made = {MADE}\n    return made\n", "work"),
        ("def work(rate) -> Training:\n    return base(rate)\n", "work"),
        (f"def _base(rate):\n    return {MADE}\ndef work():\n    return _base(0.1)\n", "work"),
        (f"def make(rate):\n    return {MADE}\nwork = make(0.1)\n", "work"),
        (f"small = {MADE}\njob = {MADE}\n", "job"),
        (f"small = {MADE}\ndef job():\n    return {MADE}\n", "job"),
        (f"def test():\n    {MADE}\nwork = {MADE}\n", "work"),
        (f"if big:\n    work = {MADE}\nelse:\n    work = {MADE}\n", "work"),
    ],
)
def test_a_training_is_found(text: str, name: str) -> None:
    assert training_in("digits.py", text) == name


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            f"small = {MADE}\nlarge = {MADE}\n",
            "digits.py has small, large: say which, for example digits.py:small",
        ),
        (
            f"def a():\n    return {MADE}\ndef b():\n    return {MADE}\n",
            "digits.py has a, b: say which, for example digits.py:a",
        ),
        ("job = = 1", "digits.py, line 1: "),
        ("def test():\n    Training()\n", "digits.py has no shoal_trainer.Training. Add one, such as"),
    ],
)
def test_what_cannot_be_told_says_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"digits\.py") as refused:
        training_in("digits.py", text)
    assert words in str(refused.value)


def test_a_script_without_a_training_is_told_how_to_write_one() -> None:
    with pytest.raises(
        ValueError, match=r"from shoal_trainer import Training(?s:.)*take out line 2, which calls fit"
    ):
        training_in("digits.py", "model = build()\nmodel.fit(x, y)\ndef test():\n    Training()\n")


def test_a_name_that_the_file_lacks() -> None:
    must_define("digits.py", "job = 1\n", "job")
    must_define("digits.py", "from other import *\n", "job")
    with pytest.raises(ValueError, match=r"digits\.py has no 'jib' at its top level: did you mean job"):
        must_define("digits.py", "job = 1\n", "jib")


@pytest.mark.parametrize(
    ("file", "better"),
    [
        ("my-job.py", "my_job.py"),
        ("2024.py", "job_2024.py"),
        ("a.b.py", "a_b.py"),
        ("class.py", "job_class.py"),
        ("größe.py", "gr__e.py"),
    ],
)
def test_a_file_that_cannot_be_imported_is_given_a_name(file: str, better: str) -> None:
    with pytest.raises(ValueError, match=f"rename it, for example to {re.escape(better)}$"):
        module_of(file)
    assert module_of(f"folder/{better}") == better.removesuffix(".py")
