"""Has a run's report written by a process of its own, whose failure costs the run nothing."""

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path

from asyncrl.config.install_hints import program
from asyncrl.telemetry.run_directory import RunDirectory

DEADLINE = 60.0
"""Seconds for the report, which takes about two."""
WRITE = ("-m", "asyncrl.deploy.cli", "report")


async def report_run(run_dir: Path, say: Callable[[str], None], deadline: float = DEADLINE) -> None:
    """Writes `RUN_DIR/report.html` and says so, or what went wrong and the command that tries it again."""
    pipe = asyncio.subprocess.PIPE
    child = await asyncio.create_subprocess_exec(
        sys.executable, *WRITE, str(run_dir), stdin=asyncio.subprocess.DEVNULL, stdout=pipe, stderr=pipe
    )
    try:
        async with asyncio.timeout(deadline):
            _, complaint = await child.communicate()
    except TimeoutError:
        complaint = f"it took longer than {deadline:.0f} s".encode()
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode == 0:
        say(f"report: {RunDirectory(run_dir).report}")
    else:
        last = complaint.decode(errors="replace").strip().rpartition("\n")[2].removeprefix("asyncrl: ")
        say(f"the report could not be written: {last}; to try again: `{program()} report {run_dir}`")
