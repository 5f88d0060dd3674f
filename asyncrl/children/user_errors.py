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


def trace(error: BaseException) -> str:
    """Returns the end of an error's traceback, without the frames of asyncrl that called the user's code."""
    first = error.__traceback__
    while first is not None and first.tb_frame.f_code.co_filename.startswith((OWN, "<frozen ")):
        first = first.tb_next
    return "".join(traceback.format_exception(type(error), error, first or error.__traceback__))[-TRACEBACK:]


def greeting(key: str, load: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Returns the first message of a child: what `load` returns, or the mistake of the user that it met. key: of the
    config, which names what is loaded."""
    try:
        return load()
    except ConfigError as error:
        return {"mistake": str(error)}
    except Exception as error:  # loading imports the user's file, which runs the user's code
        return {"mistake": f"{key} could not be loaded: {type(error).__name__}: {error}\n{trace(error)}"}
