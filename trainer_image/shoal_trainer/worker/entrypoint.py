"""From `spec.training.entrypoint` ("module:object") to the user's `Training`, with errors that say what to change."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

from shoal_trainer.data.trouble import GRAPH, words
from shoal_trainer.errors import UserError
from shoal_trainer.training import Training, as_training


def load(entrypoint: str, args: dict[str, Any] | None = None, folder: Path | None = None) -> Training:
    """Import the module (from `folder`, by default the working directory, or installed) and take the object from it.

    Raises `UserError` where the module, the object or what it returns is not what it should be.
    """
    folder = folder or Path.cwd()
    module_name, separator, attribute = entrypoint.partition(":")
    if not separator or not module_name or not attribute:
        raise UserError(
            f"The entrypoint {entrypoint!r} must be module:object, for example digits:job, where digits.py is in the "
            "working directory of the image."
        )
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    if _missing(module_name):
        near = difflib.get_close_matches(module_name, [path.stem for path in folder.glob("*.py")], n=1)
        hint = (
            f"Did you mean {near[0]!r}?"
            if near
            else f"Put {module_name.split('.')[0]}.py into {folder}, or install it."
        )
        raise UserError(
            f"The entrypoint {entrypoint!r} names the module {module_name!r}, which does not exist. {hint}"
        )
    try:
        module = importlib.import_module(module_name)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(
            f"The module {module_name!r} of the entrypoint cannot be imported: {where(error)}"
        ) from error
    found: Any = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            hint = (
                f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(_public(found)) or 'nothing'}."
            )
            raise UserError(f"The entrypoint {entrypoint!r}: {module_name} has no {part!r}. {hint}")
        found = getattr(found, part)
    try:
        return as_training(found, args or {}, entrypoint)
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        raise UserError(f"The entrypoint {entrypoint!r} failed: {where(error)}") from error


def where(error: BaseException) -> str:
    """An error of the user's code in one line: type, words, and the line of the user's file that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [
        f
        for f in frames
        if "site-packages" not in f.filename
        and "shoal_trainer" not in f.filename
        and "<frozen" not in f.filename
    ]
    if isinstance(error, SyntaxError):
        place = f" ({error.filename}:{error.lineno})"
    else:
        place = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    tensorflow = type(error).__module__.startswith("tensorflow.")
    text = words(error) if tensorflow or GRAPH.match(str(error)) else " ".join(str(error).split())[:600]
    return f"{type(error).__name__}: {text}{place}"


def _missing(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is None
    except ModuleNotFoundError:
        return True


def _public(found: Any) -> list[str]:
    return [name for name in dir(found) if not name.startswith("_")][:12]
