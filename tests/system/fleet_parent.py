"""A controller process of its own, for tests that kill it: starts a fleet of stand-ins and waits to be killed."""

import asyncio
import signal
import sys
from pathlib import Path
from typing import Literal

from standins import Echo, forks_without_torch

from asyncrl.config.schema import Config, FleetConfig, ModelConfig, TaskConfig
from asyncrl.deploy.process.local_launcher import LocalLauncher
from asyncrl.fleet.fleet import ServiceSpec, running_fleet
from asyncrl.fleet.worker.worker_spec import RunFacts


def up(run_dir: str) -> None:
    Path(run_dir, "up").touch()


async def main(run: str, run_dir: str, start: Literal["fork", "spawn"]) -> None:
    config = Config(model=ModelConfig(name="none"), task=TaskConfig(prompts="none"), fleet=FleetConfig(start=start))
    facts = RunFacts(run, Path(run_dir), Path(run_dir), 0, "none", config)
    specs = [ServiceSpec("echo", Echo, "standins:EchoService", replicas=2)]
    with forks_without_torch(config) as forks, LocalLauncher(run, forks=forks) as launcher:
        async with running_fleet(specs, facts, launcher=launcher) as running:
            waiting = asyncio.ensure_future(running.handle("echo", Echo).wait())
            up(run_dir)
            await waiting


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # A shell's background job would ignore it.
    run, run_dir, start = sys.argv[1:]
    asyncio.run(main(run, run_dir, "fork" if start == "fork" else "spawn"))
