"""Describes an error of the user's code in one line: its type, its message, and the line of the user's file.

TensorFlow and Keras put many frames of their own around that line, or give it only in the text of their error.
"""

from __future__ import annotations

import contextlib
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from shoal_trainer.data.read_errors import GRAPH, TRACEBACK, is_network_outage, summary
from shoal_trainer.errors import TrainerError, Unreachable, UserError

OTHERS = tuple(
    f"{folder}{os.sep}"
    for folder in (*map(sysconfig.get_path, ("stdlib", "platstdlib", "scripts")), Path(__file__).parents[1])
)
"""Folders of code that is not the user's."""
PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]|^<|__autograph_generated_file")
FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
COLOR = re.compile(r"\x1b\[[0-9;]*m")
MAX_TEXT = 600
TUTORIAL = "\n\nExample:"
"""What follows is a lesson that Keras adds to an error."""


def where(error: BaseException) -> str:
    """An error of the user's code in one line: type, message, and the line of the user's file that raised it."""
    if type(error).__module__.startswith("tensorflow.") or GRAPH.match(str(error)):
        text = summary(error)
    else:
        text = " ".join(COLOR.sub("", str(error).partition(TUTORIAL)[0]).split())[:MAX_TEXT]
    kind = type(error).__name__
    return (text if text.startswith(f"{kind}:") else f"{kind}: {text}") + located(error)


def located(error: BaseException) -> str:
    """` (job.py:12 in parse)`, the last frame of the user's code; empty if there is none."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" ({_short(error.filename)}:{error.lineno})"
    for frames in (_in_text(error), _in_traceback(error)):
        own = [frame for frame in frames if _is_users(frame[0])]
        if own:
            file, line, function = own[-1]
            return f" ({_short(file)}:{line}" + ("" if function == "<module>" else f" in {function}") + ")"
    return ""


@contextlib.contextmanager
def blamed_on_user(
    what: str, failed: str, remedy: Callable[[BaseException], str] = lambda _: ""
) -> Iterator[None]:
    """What this block, which runs the user's code, raises is a `UserError` with its place; an outage is `Unreachable`.

    An error of the network is one, as the code may load data or weights.
    """
    try:
        yield
    except UserError as error:
        raise UserError(f"{error}{located(error)}") from error
    except TrainerError:
        raise
    except (Exception, SystemExit) as error:
        if is_network_outage(error):
            raise Unreachable(f"{what}: {summary(error)}") from error
        raise UserError(f"{failed}: {where(error)}{remedy(error)}") from error


def _in_text(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """The frames that TensorFlow gives as text: they are inside those of the traceback."""
    text = str(error)
    if GRAPH.match(text) or TRACEBACK in text:
        yield from ((file, int(line), function) for file, line, function in FRAME.findall(text))


def _in_traceback(error: BaseException) -> Iterator[tuple[str, int, str]]:
    for frame in traceback.extract_tb(error.__traceback__):
        yield frame.filename, frame.lineno or 0, frame.name


def _is_users(file: str) -> bool:
    return not PACKAGES.search(file) and not file.startswith(OTHERS)


def _short(file: str) -> str:
    """The path relative to the working directory, if the file is in it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
