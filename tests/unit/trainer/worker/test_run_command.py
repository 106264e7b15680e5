"""`shoal-trainer run` checks the entrypoint before it starts a process; its help is complete."""

import re
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from shoal_trainer.cli import main
from shoal_trainer.contract import InitialFrom, Role
from shoal_trainer.errors import UserError
from shoal_trainer.run.processes import LocalRun
from shoal_trainer.worker.entrypoint import load


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere.py").write_text("raise RuntimeError('imported')\n")
    tmp_path = tmp_path / "here"
    (tmp_path / "beds").mkdir(parents=True)
    made = "Training(model=None, data=None)"
    (tmp_path / "beds" / "roses.py").write_text(f"raise RuntimeError('imported')\nwork = {made}\n")
    (tmp_path / "my-job.py").write_text(f"job = {made}\n")
    (tmp_path / "two.py").write_text(f"small = {made}\nlarge = {made}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("shoal_trainer.run.watch.watch", lambda _job: pytest.fail("a process was started"))
    (tmp_path / "flowers.py").write_text("raise RuntimeError('imported')\n")
    return tmp_path


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("flower", "'flower' must be FILE.py, FILE.py:OBJECT or MODULE:OBJECT, for example digits.py:job"),
        ("../flowers.py:job", "there is no file ../flowers.py"),
        (
            "../elsewhere.py:job",
            "../elsewhere.py is not in this folder or below it: go to its folder first: cd /",
        ),
        ("flowers.py", "flowers.py has no shoal_trainer.Training. Add one, such as"),
        ("flowers", "flowers.py has no shoal_trainer.Training. Add one, such as"),
        ("my-job.py", "Python cannot import my-job.py by its name: rename it, for example to my_job.py"),
        (
            "flowers.ipynb",
            "'flowers.ipynb' must be FILE.py, FILE.py:OBJECT or MODULE:OBJECT, for example "
            "digits.py:job; `jupyter nbconvert --to script flowers.ipynb` makes a file of a notebook",
        ),
        ("two.py", "two.py has small, large: say which, for example two.py:small"),
        *(
            (each, f"The entrypoint '{each}' must be module:object")
            for each in ("flowers:", ":job", "./flowers:job", "a..b:job")
        ),
    ],
)
def test_run_with_malformed_entrypoint_starts_nothing(folder, entrypoint, words):
    result = CliRunner().invoke(main, ["run", entrypoint])
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert re.search(r"Invalid value for '?FILE\.py\[:OBJECT\]\|MODULE:OBJECT'?: " + re.escape(words), output)
    assert "image" not in output


@pytest.mark.parametrize(
    ("entrypoint", "hint"),
    [("flower:job", "Did you mean 'flowers'?"), ("garden.roses:job", "Put garden.py into")],
)
def test_run_with_missing_module_starts_nothing(folder, entrypoint, hint):
    result = CliRunner().invoke(main, ["run", entrypoint])
    assert result.exit_code == 2
    output = " ".join(result.output.split())
    assert "which does not exist" in output
    assert hint in output


@pytest.mark.parametrize("entrypoint", ["flowers:job", "flowers.py:job", "./flowers.py:job"])
def test_run_with_existing_module_does_not_import_it(folder, monkeypatch, entrypoint):
    """A file may be named as for `shoal submit`."""
    monkeypatch.setattr(
        "shoal_trainer.run.watch.watch", lambda job: 0 if job.entrypoint == "flowers:job" else 1
    )
    assert CliRunner().invoke(main, ["run", entrypoint]).exit_code == 0


@pytest.mark.parametrize(
    "entrypoint", ["beds/roses.py", "./beds/roses.py", "beds.roses", "beds/../beds/roses.py:work"]
)
def test_the_training_of_a_file_is_found_without_running_it(folder, monkeypatch, entrypoint):
    jobs = []
    monkeypatch.setattr("shoal_trainer.run.watch.watch", lambda job: jobs.append(job) or 0)
    for named in (entrypoint, str(folder / "beds" / "roses.py")):
        assert CliRunner().invoke(main, ["run", named]).exit_code == 0
    assert [each.entrypoint for each in jobs] == ["beds.roses:work"] * 2


@pytest.mark.parametrize(
    ("init", "words"),
    [
        ("", "names the module 'plants.roses', which does not exist"),
        ("import soil_of_mars\n", "cannot be imported: ModuleNotFoundError: No module named 'soil_of_mars'"),
        ("raise ValueError('dry')\n", "cannot be imported: ValueError: dry"),
    ],
)
def test_broken_package_of_entrypoint_is_user_error(folder, init, words):
    (folder / "plants").mkdir()
    (folder / "plants" / "__init__.py").write_text(init)
    try:
        with pytest.raises(UserError, match=re.escape(words)):
            load("plants.roses:job", folder=folder)
    finally:
        sys.modules.pop("plants", None)


@pytest.mark.parametrize(("mode", "direction"), [("max", "Max"), ("MIN", "Min")])
def test_mode_of_run_sets_the_direction(folder, monkeypatch, mode, direction):
    jobs = []
    monkeypatch.setattr("shoal_trainer.run.watch.watch", lambda job: jobs.append(job) or 0)
    arguments = ["run", "flowers:job", "--until", "dice=0.9", "--mode", mode]
    assert CliRunner().invoke(main, arguments).exit_code == 0
    assert jobs[0].stop_after.mode == direction


def test_initial_from_continues_another_run(folder, monkeypatch):
    jobs = []
    monkeypatch.setattr("shoal_trainer.run.watch.watch", lambda job: jobs.append(job) or 0)
    for options in (["s3://bucket/run"], ["shoal-runs/local/flowers/1", "--weights-only"]):
        assert CliRunner().invoke(main, ["run", "flowers:job", "--initial-from", *options]).exit_code == 0
    configs = [LocalRun(job)._config(Role.PS, 0, 0).initial_from for job in jobs]
    assert configs == [
        InitialFrom(uri="s3://bucket/run"),
        InitialFrom(uri=(folder / "shoal-runs/local/flowers/1").as_uri(), weights_only=True),
    ]
    result = CliRunner().invoke(main, ["run", "flowers:job", "--weights-only"])
    assert "--weights-only requires --initial-from" in result.output


def test_help_describes_every_option_of_run():
    run = main.commands["run"]
    options = [parameter for parameter in run.params if parameter.param_type_name == "option"]
    assert [option.name for option in options if not option.help] == []
    helps = {option.name: option.help for option in options}
    assert helps["mode"].endswith("Inferred for Keras' built-in metrics.")
    assert "[min|max]" in CliRunner().invoke(main, ["run", "--help"]).output
    assert "(min) or rise (max)" in helps["mode"]
    assert helps["kill"] == "Which processes --kill-every kills."
    assert not re.search("INTEGER|FLOAT|TEXT", CliRunner().invoke(main, ["run", "--help"]).output)


def test_help_and_documentation_of_run_have_the_same_options():
    page = (Path(__file__).parents[4] / "docs/laptop.md").read_text()
    described = set(
        re.findall(
            r"`(--[a-z-]+)|(?<=, `)(--[a-z-]+)", page.partition("Options of `run`")[2].partition("\n## ")[0]
        )
    )
    described = {name for names in described for name in names if name}
    options = [
        parameter for parameter in main.commands["run"].params if parameter.param_type_name == "option"
    ]
    assert described == {option.opts[0] for option in options}


def test_spaces_around_the_target_are_ignored(folder, monkeypatch):
    jobs = []
    monkeypatch.setattr("shoal_trainer.run.watch.watch", lambda job: jobs.append(job) or 0)
    assert CliRunner().invoke(main, ["run", "flowers:job", "--until", "val_accuracy = 0.9"]).exit_code == 0
    assert (jobs[0].stop_after.metric, jobs[0].stop_after.value) == ("val_accuracy", 0.9)
