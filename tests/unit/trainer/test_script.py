"""Which Training of a file is meant, where nobody says it; the file is read and not run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shoal_trainer.script import beside, module_of, must_define, target, training_in

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
        (f"\ufeffwork = {MADE}\n".encode(), "work"),
        (f"if big:\n    work = {MADE}\nelse:\n    work = {MADE}\n", "work"),
    ],
)
def test_a_training_is_found(text: str | bytes, name: str) -> None:
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
        (
            f"x = 1\nif __name__ == '__main__':\n    work = {MADE}\n",
            "digits.py, line 3: work is under `if __name__ == '__main__':`, which runs only where the file is",
        ),
    ],
)
def test_what_cannot_be_told_says_what_to_do(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"digits\.py") as refused:
        training_in("digits.py", text)
    assert words in str(refused.value)


def test_a_script_without_a_training_is_told_how_to_write_one() -> None:
    with pytest.raises(
        ValueError,
        match=r"from shoal_trainer import Training[^$]*the call of fit\(\) that trains it \(line 2 or 3\), or put it",
    ):
        training_in("digits.py", "Scaler().fit(x)\nm.fit(x, y)\nm.fit(files, epochs=2)\n")


def test_a_script_that_trains_only_as_a_program_may_keep_its_fit() -> None:
    text = "def main():\n    m.fit(x, y)\n\nif __name__ == '__main__':\n    m.fit(x, y)\n    main()\n"
    with pytest.raises(ValueError, match=r"leave fit\(\) only under .*, where it may stay\. Then") as refused:
        training_in("digits.py", text)
    assert "take out" not in str(refused.value)


def test_a_name_that_the_file_lacks() -> None:
    must_define("digits.py", "job = 1\n", "job")
    must_define("digits.py", "from other import *\n", "job")
    with pytest.raises(ValueError, match=r"digits\.py, line 2: job is under `if __name__ == '__main__'"):
        must_define("digits.py", 'if "__main__" == __name__:\n    job = 1\n', "job")
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


def test_what_a_script_imports_from_beside_it_belongs_to_it(tmp_path: Path) -> None:
    for name, text in {
        "job.py": "import helpers\nimport json\nfrom . import near\ndef f():\n    from pkg.deep import a\n",
        "helpers.py": "import more, job\n",
        "more.py": "",
        "near.py": "",
        "alone.py": "",
        "pkg/__init__.py": "",
        "pkg/deep.py": "import third\n",
        "third.py": "",
        "folder/data.py": "",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [each.name for each in beside(tmp_path / "job.py")]
    assert found == ["helpers.py", "more.py", "pkg", "third.py"]
    (tmp_path / "more.py").write_text("= 1")
    with pytest.raises(ValueError, match=r"more\.py, line 1: invalid syntax"):
        beside(tmp_path / "job.py")


def test_a_target_is_a_metric_and_a_number() -> None:
    assert target("val_accuracy = 0.97") == ("val_accuracy", 0.97)
    for text in ("accuracy", "=0.9", "acc>=0.9", "acc<=0.9", "acc=high", "acc=nan", "acc=inf"):
        with pytest.raises(ValueError, match=f"^'{text}' must be METRIC=VALUE with a number, for example"):
            target(text)
