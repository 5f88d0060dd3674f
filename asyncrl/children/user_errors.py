"""Turns errors of the user's code into text for the worker."""

import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError

OWN = str(Path(__file__).parents[1]) + os.sep
TRACEBACK = 4000
"""Characters of a traceback that are reported: its end, where the error is."""

READ_ONLY = ("[Errno 30]", "readonly database", "unable to open database file")
"""Texts of errors of Python and of SQLite in a file system that is read-only."""


def trace(error: BaseException) -> str:
    """Returns the end of an error's traceback, without the frames of asyncrl that called the user's code."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith((OWN, "<frozen ")):
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))[-TRACEBACK:]


def where_to_write(error: BaseException) -> str:
    """Returns where contained code may write, as the end of a sentence, for an error that says that it wrote elsewhere;
    "" for other errors."""
    if not any(each in trace(error) for each in READ_ONLY):
        return ""
    return (
        "; this code runs in a sandbox, where it may write only to its own empty /tmp, /var/tmp, /run and /dev/shm: "
        "name the folder of the file in children.writable"
    )


def greeting(key: str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the first message of a child: what `load` returns, or the mistake of the user that it met. key: of the
    config, which names what is loaded."""
    try:
        return load()
    except ConfigError as error:
        return {"mistake": str(error)}
    except Exception as error:  # loading imports the user's file, which runs the user's code
        raised = f"{type(error).__name__}: {error}{where_to_write(error)}"
        return {"mistake": f"{key} could not be loaded: {raised}\n{trace(error)}"}
