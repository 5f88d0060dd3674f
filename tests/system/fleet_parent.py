"""A controller process of its own, for tests that kill it: starts a fleet of stand-ins and waits to be killed."""

import asyncio
import signal
import sys
from pathlib import Path

from standins import Echo

from asyncrl.config import Config, Model, Task
from asyncrl.deploy.local import LocalLauncher
from asyncrl.fleet import ServiceSpec, running_fleet
from asyncrl.launch import RunFacts


def up(run_dir: str) -> None:
    Path(run_dir, "up").touch()


async def main(run: str, run_dir: str) -> None:
    config = Config(model=Model(name="none"), task=Task(prompts="none"))
    facts = RunFacts(run, run_dir, run_dir, 0, "none", config)
    specs = [ServiceSpec("echo", Echo, "standins:EchoService", replicas=2)]
    with LocalLauncher(run) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            waiting = asyncio.ensure_future(running.handle("echo", Echo).wait())
            up(run_dir)
            await waiting


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job would ignore it.
    asyncio.run(main(*sys.argv[1:]))
