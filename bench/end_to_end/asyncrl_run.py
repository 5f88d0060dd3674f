"""Runs asyncrl on the end-to-end workload: `python -m asyncrl.bench.end_to_end.asyncrl_run JSON`."""

import asyncio
import json
import os
import sys
from pathlib import Path

from asyncrl.config.sources import load
from asyncrl.deploy.training_run import RunRequest, run
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.protocols.contracts import Generation
from asyncrl.telemetry.display import LineDisplay

SAMPLER = "asyncrl.bench.end_to_end.prescribed_lengths:PrescribedLengths"


def main() -> None:
    """Reads the argument: `values` of the config, `lengths` of each sample of a batch, and `run_dir`."""
    given = json.loads(sys.argv[1])
    config = load(None, (), values=given["values"]).config
    services = {"generation": ServiceSpec("generation", Generation, SAMPLER, options={"lengths": given["lengths"]})}
    with open(os.devnull, "w") as null:
        display = LineDisplay(null, config.steps)
        request = RunRequest(config, Path(given["run_dir"]), display, "asyncrl-bench end-to-end", services=services)
        asyncio.run(run(request))


if __name__ == "__main__":
    main()
