"""An actor of Ray that offers its node to a run, as `asyncrl join` does there: by that command, as a child.

Ray starts the actor again when it or its node died, and so the node, or the next one, joins again. This module imports
nothing that a worker needs, and no Ray.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path

KEPT_LINES = 500
"""Last lines of output that are kept for the run directory, some 50 kB."""

LOG_BYTES = 8 << 20
"""Last bytes of a log that are handed over: an actor answers with all its logs at once."""

RESUMABLE = 75
"""Exit status of `asyncrl join` that has found no run in time."""

STARTED_AGAIN = 1
"""Exit status of an actor whose child died. Ray counts each death of an actor that it did not order as one to mend."""

CREDENTIALS = ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")


class NodeHost:
    """Runs `asyncrl join`. command: it, without the interpreter; it reads `key` from its standard input, and leaves
    the run when that ends, with this process. name: of the folder for logs of workers that do not see the run's."""

    def __init__(self, command: list[str], key: str, name: str) -> None:
        self._lines: deque[str] = deque(maxlen=KEPT_LINES)
        self._folder = Path(tempfile.gettempdir(), name)
        self._child = subprocess.Popen(
            [sys.executable, *command, "--logs", str(self._folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=0,  # Whoever signals our group, for instance a terminal, does not mean hosts.
            env=without_credentials(os.environ),
        )
        assert self._child.stdin is not None
        self._child.stdin.write(f"{' '.join(key.split())}\n")
        self._child.stdin.flush()
        threading.Thread(target=self._follow, name="asyncrl join", daemon=True).start()

    def _follow(self) -> None:
        """Ends this actor when its child died or found no run: Ray starts it again. A run that has ended, or refuses
        this host, gets no other one."""
        assert self._child.stdout is not None
        self._lines.extend(self._child.stdout)
        status = self._child.wait()
        if status < 0 or status == RESUMABLE:
            os._exit(STARTED_AGAIN)

    def node(self) -> str:
        """Returns the name of the machine."""
        return socket.gethostname()

    def logs(self, own_name: str) -> dict[str, bytes]:
        """Returns the last lines of the child, under `own_name`, and the last bytes of the logs of its workers where
        they lie here; removes these."""
        found = {own_name: "".join(list(self._lines)).encode()}
        for path in self._folder.glob("logs/*"):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - LOG_BYTES))
                found[path.name] = file.read(LOG_BYTES)
        shutil.rmtree(self._folder, ignore_errors=True)
        return found


def without_credentials(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without what lets a process use the Ray cluster, which rewards of a user do not need."""
    return {name: value for name, value in environment.items() if name not in CREDENTIALS}
