"""Commands as the user can type them here: asyncrl itself, and pip. Imports only the standard library."""

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path
from urllib.parse import unquote, urlparse


def program() -> str:
    """Returns the command for `asyncrl`: its name if the shell finds this installation by it, else its path."""
    typed = Path(sys.argv[0])
    script = typed if typed.name == "asyncrl" and typed.is_file() else Path(sysconfig.get_path("scripts"), "asyncrl")
    if not script.is_file():
        return shlex.join([_short(Path(sys.executable)), "-m", "asyncrl.deploy.cli"])
    found = shutil.which("asyncrl")
    if found is not None and os.path.samefile(found, script):
        return "asyncrl"
    path = str(typed) if script is typed else _short(script)
    return shlex.quote(path if os.sep in path else os.path.join(os.curdir, path))


def pip_install(*arguments: str) -> str:
    """Returns `.venv/bin/python -m pip install ...` with the interpreter of this process."""
    return shlex.join([_short(Path(sys.executable)), "-m", "pip", "install", *arguments])


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of asyncrl; a checkout is installed in place, with its pins."""
    checkout = _checkout()
    if checkout is None:
        return pip_install(f"asyncrl[{extra}]")
    pins = checkout / "constraints.txt"
    pinned = ["-c", _short(pins)] if pins.is_file() else []
    return pip_install(*pinned, "-e", f"{_short(checkout)}[{extra}]")


def _short(path: Path) -> str:
    """Shortens a path below the working directory, without resolving links: a virtual environment's Python is one."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _checkout() -> Path | None:
    """Returns the folder that asyncrl was installed from with `pip install --editable`, if it was."""
    try:
        text = importlib.metadata.distribution("asyncrl").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))
