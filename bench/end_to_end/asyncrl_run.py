"""One run of ours on the end-to-end workload, in a process of its own: `python -m asyncrl.bench.own_run JSON`."""

import asyncio
import json
import os
import sys
from pathlib import Path

from asyncrl.deploy.beginning import Order
from asyncrl.deploy.run import run
from asyncrl.fleet import ServiceSpec
from asyncrl.protocols.contracts import Generation
from asyncrl.settings import load
from asyncrl.telemetry.display import LineDisplay


def main() -> None:
    """values: of the config; lengths: of each sample of a batch; run_dir."""
    given = json.loads(sys.argv[1])
    config = load(None, (), values=given["values"]).config
    sampler = ServiceSpec(
        "generation",
        Generation,
        "asyncrl.bench.lengths:PrescribedLengths",
        options={"lengths": given["lengths"]},
    )
    with open(os.devnull, "w") as nowhere:
        display = LineDisplay(nowhere, config.steps)
        order = Order(
            config, Path(given["run_dir"]), display, "asyncrl-bench end-to-end", services={"generation": sampler}
        )
        asyncio.run(run(order))


if __name__ == "__main__":
    main()
