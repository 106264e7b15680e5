"""Loads the user's `Training` from an entrypoint, "module:object", with errors that say what to change."""

from __future__ import annotations

import contextlib
import difflib
import errno
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

from shoal_trainer.contract import CODE_ARCHIVE, CODE_DIR
from shoal_trainer.data.user_code import blamed_on_user
from shoal_trainer.errors import UserError
from shoal_trainer.training import Training, as_training

log = logging.getLogger(__name__)

USAGE = 2
"""The code with which argparse exits."""


def load(
    entrypoint: str,
    args: dict[str, Any] | None = None,
    folder: Path | None = None,
    *,
    archive: Path | None = None,
) -> Training:
    """Import the module and get the object.

    It is looked for in `folder` (default: the job's own code, in `archive` or from a ConfigMap, then the working
    directory) and among the installed packages.

    Raises `UserError` if the module or the object does not exist, or the object does not give a `Training`;
    `Unreachable` if it loads data that are not reachable.
    """
    code = (archive, Path(CODE_DIR, CODE_ARCHIVE), Path(CODE_DIR))
    folders = [folder] if folder else [*[each for each in code if each and each.exists()], Path.cwd()]
    folder = folders[0]
    module_name, attribute = check(entrypoint, *folders)
    sys.path[:0] = [str(each) for each in folders if str(each) not in sys.path]
    failed = f"The module {module_name!r} of the entrypoint cannot be imported"
    with blamed_on_user(f"the module {module_name!r}", failed, _remedy), _told_of_fit():
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if f"{module_name}.".startswith(f"{error.name}."):
                raise _missing(entrypoint, module_name, folder) from error
            raise
    ours = folder / f"{module_name.replace('.', '/')}.py"
    theirs = getattr(module, "__file__", None)
    if theirs and ours.is_file() and ours.resolve() != Path(theirs).resolve():
        raise UserError(
            f"The file {ours.name} of the entrypoint is hidden by the module {module_name!r} of {theirs}, which is "
            "imported before it: give the file another name."
        )
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            names = _candidates(found)
            near = difflib.get_close_matches(part, names, n=1)
            listed = (
                f"It has: {', '.join(names)}."
                if names
                else "It has no Training and no function: docs/keras.md."
            )
            hint = f"Did you mean {near[0]!r}?" if near else listed
            raise UserError(f"The entrypoint {entrypoint!r}: {module_name} has no {part!r}. {hint}")
        found = getattr(found, part)
    with blamed_on_user(f"the entrypoint {entrypoint!r}", f"The entrypoint {entrypoint!r} failed", _remedy):
        return as_training(found, args or {}, entrypoint)


@contextlib.contextmanager
def _told_of_fit() -> Iterator[None]:
    """Log it if `fit` is called in this block; it trains as always."""
    import keras

    fit = keras.Model.fit

    def told(model: keras.Model, *args: Any, **options: Any) -> Any:
        log.warning(
            "the module calls fit() when it is imported: every worker trains before it joins. Put it under "
            "`if __name__ == '__main__':`"
        )
        keras.Model.fit = fit  # once is enough
        return model.fit(*args, **options)

    keras.Model.fit = told
    try:
        yield
    finally:
        keras.Model.fit = fit


def check(entrypoint: str, *folders: Path) -> tuple[str, str]:
    """Split "module:object" and look for the top-level module without importing it. Raises `UserError`."""
    module_name, separator, attribute = entrypoint.partition(":")
    is_path = "/" in module_name or module_name.endswith(".py")
    if not separator or is_path or not all((*module_name.split("."), *attribute.split("."))):
        raise UserError(
            f"The entrypoint {entrypoint!r} must be module:object, for example digits:job for job in digits.py."
        )
    top = module_name.partition(".")[0]
    if (
        top not in sys.modules
        and PathFinder.find_spec(top, [str(folder) for folder in folders]) is None
        and importlib.util.find_spec(top) is None
    ):
        raise _missing(entrypoint, module_name, folders[0])
    return module_name, attribute


def _missing(entrypoint: str, module_name: str, folder: Path) -> UserError:
    known = [path.stem for path in folder.glob("*.py")]
    near = difflib.get_close_matches(module_name, known, n=1)
    top = module_name.partition(".")[0]
    hint = f"Did you mean {near[0]!r}?" if near else f"Put {top}.py into {folder}, or install it."
    return UserError(
        f"The entrypoint {entrypoint!r} names the module {module_name!r}, which does not exist. {hint}"
    )


def _remedy(error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            ". A package: install it here with pip, and for a cluster in an image of your own (docs/install.md, Your "
            "image). A file of your own: `shoal submit` takes what lies beside the script, and the rest by --file PATH"
        )
    if isinstance(error, TypeError) and str(error).startswith("Training.__init__() got an unexpected"):
        return ". What Keras' fit takes is elsewhere in a job (docs/keras.md, From fit)"
    if isinstance(error, FileNotFoundError):
        return (
            ". A pod has the script and what travels with it (--file PATH), and nothing else of your machine: data "
            "belong in a bucket, a volume of the template, or the image"
        )
    if isinstance(error, OSError) and error.errno == errno.EROFS:
        return ". In a pod only /tmp can be written: write there, or into a volume of the template"
    if isinstance(error, NameError) and error.name == "get_ipython":
        return ". It is a command of a notebook (% or !), which a script has not: take the line out"
    if isinstance(error, SystemExit) and error.code == USAGE:
        return (
            ". An entrypoint has no command line: take the values as arguments of a function that returns the "
            "Training, and give them with --arg NAME=VALUE or spec.training.args"
        )
    return ""


def _candidates(found: Any) -> list[str]:
    """Names that an entrypoint may mean: each `Training`, then the functions of the module itself."""
    named = {name: getattr(found, name, None) for name in dir(found) if not name.startswith("_")}
    own = getattr(found, "__name__", "")
    functions = [name for name, each in named.items() if inspect.isfunction(each) and each.__module__ == own]
    return [name for name, each in named.items() if isinstance(each, Training)] + functions
