"""Steps a second of an acting worker whose environments wait: synchronous and asynchronous feedback.

    python -m asyncrl.bench.learning.acting_feedback --milliseconds 5

One line for each way: eight environments step in turn in one child, each in a child of its own in lockstep, or each in
a thread of one child as it comes. Needs the extra `acting`.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.engines.acting.acting_loop import ActingLoop, Recording
from asyncrl.engines.acting.acting_policy import ActingPolicy
from asyncrl.engines.acting.stepping.stepped_environments import SteppedEnvironments
from asyncrl.environments.adapters.packages import package
from asyncrl.fleet.worker.compute_thread import ThreadCompute
from asyncrl.telemetry.state_clock import Occupancy, StateClock

ENVIRONMENTS = 8
TRANSITIONS = 50
WAYS = (("synchronous", 1), ("synchronous", ENVIRONMENTS), ("asynchronous", 1))


def waiting_pole(seconds: float, uneven: bool = False) -> Any:
    """Makes CartPole whose step waits: always as long, or for an exponentially distributed time of this mean."""
    pole = package("gymnasium", "acting", "acting.env").make("CartPole-v1")
    step = pole.step

    def wait_and_step(action: Any) -> Any:
        time.sleep(random.expovariate(1 / seconds) if uneven else seconds)
        return step(action)

    pole.step = wait_and_step
    return pole


def config_of(seconds: float, uneven: bool, feedback: str, children: int) -> Config:
    acting: dict[str, Any] = {"env": f"{__spec__.name}:waiting_pole", "options": {"seconds": seconds, "uneven": uneven}}
    acting |= {"environments": ENVIRONMENTS, "children": children, "feedback": feedback, "transitions": TRANSITIONS}
    return load(None, (), {}, {"acting": acting}).config


async def rate(config: Config, steps: int, printed: Path) -> float:
    """Returns steps a second of all environments together."""
    settings = config.acting
    clock = StateClock(time.monotonic)
    async with asyncio.TaskGroup() as tasks:
        environments = SteppedEnvironments(settings, tasks, seed=0, start_deadline=60.0, printed=printed)
        await environments.start()
        compute = ThreadCompute(Occupancy(clock))
        policy = ActingPolicy(config, environments.spaces, 0, version=0)
        done = asyncio.Event()
        loop = ActingLoop(
            policy,
            environments,
            compute,
            count=settings.environments,
            transitions=settings.transitions,
            lockstep=settings.feedback == "synchronous",
            finished=lambda recording: _again(loop, recording, steps, done),
            failed=lambda place, why: print(f"environment {place}: {why}"),
        )
        acting = tasks.create_task(loop.run(), name="acting")
        began = time.monotonic()
        loop.record([(0, place, 0) for place in range(settings.environments)], 0)
        await done.wait()
        seconds = time.monotonic() - began
        acting.cancel()
        await environments.stop()
        compute.close()
    return loop.steps / seconds


def _again(loop: ActingLoop, recording: Recording, steps: int, done: asyncio.Event) -> None:
    """Goes on in the environment of a full sample, until there were as many steps."""
    group, member, attempt = recording.name
    loop.record([(group + 1, member, attempt)], 0)
    if loop.steps >= steps:
        done.set()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--milliseconds", type=float, default=5.0)
    parser.add_argument("--steps", type=int, default=1600)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for uneven in (False, True):
            for feedback, children in WAYS:
                config = config_of(asked.milliseconds / 1000, uneven, feedback, children)
                found = asyncio.run(rate(config, asked.steps, Path(folder) / "printed"))
                wait = "exponential waits" if uneven else "equal waits"
                print(f"{wait}, {feedback}, {children} children: {found:.0f} steps/s", flush=True)


if __name__ == "__main__":
    main()
