"""Programs a second in sandboxes, beside bare starts of the same interpreter: `asyncrl-bench sandbox`.

Every program is new and prints one line. A bare start is `python -c PROGRAM`, whose output is read, from the same
event loop. CPU time is that of this process and of all that it started and collected, in kernel and user mode; what the
kernel does afterwards to take a network namespace apart is seen by the wall clock only.
"""

import argparse
import asyncio
import os
import resource
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from asyncrl.bench.measurements import MachineLoad, RoundValues, at_least, goal_line, in_turn, number, ratios, table
from asyncrl.children.sandbox import Program, SandboxPool, TestCase
from asyncrl.children.sandbox.bubblewrap import python_for_programs
from asyncrl.concurrency import gather

GOAL = 1 / 1.5
"""Sandboxed programs for each bare start: a sandbox may cost half a start more."""
CALLED = Program("def double(x): return 2 * x", (TestCase("calls", "for i in range(7): assert double(i) == 2 * i"),))
PRINTED = Program("print(1)", (TestCase("prints", stdout="1"),))
Side = tuple[float, float]
"""CPU-seconds of one program, and wall-clock seconds times cores."""


def cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


async def started_bare(python: str) -> None:
    process = await asyncio.create_subprocess_exec(python, "-c", PRINTED.source, stdin=DEVNULL, stdout=PIPE)
    printed, _ = await process.communicate()
    assert printed == b"1\n"


async def sandboxed(pool: SandboxPool, program: Program) -> None:
    (result,) = await pool.run_all(program)
    assert result.passed, result


async def timed(count: int, run: Callable[[], Awaitable[None]]) -> Side:
    """Runs `count` programs, one on each core at a time."""
    cores = len(os.sched_getaffinity(0))
    left = iter(range(count))

    async def one_core() -> None:
        for _ in left:
            await run()

    cpu = cpu_seconds()
    began = time.monotonic()
    await gather(*(one_core() for _ in range(cores)))
    return (cpu_seconds() - cpu) / count, (time.monotonic() - began) * cores / count


async def timed_pool(count: int, program: Program) -> Side:
    async with SandboxPool() as pool:
        return await timed(count, partial(sandboxed, pool, program))


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench sandbox", description=__doc__)
    parser.add_argument("--programs", type=at_least(1), default=200, help="Number of programs of one round.")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="Number of rounds; all sides take turns.")
    options = parser.parse_args(arguments)
    python = python_for_programs()
    load = MachineLoad()
    found = in_turn(
        {
            "bare start": lambda: asyncio.run(timed(options.programs, partial(started_bare, python))),
            "sandbox, prints": lambda: asyncio.run(timed_pool(options.programs, PRINTED)),
            "sandbox, seven calls": lambda: asyncio.run(timed_pool(options.programs, CALLED)),
        },
        options.rounds,
    )
    cpu, wall = (
        {name: RoundValues(tuple(1 / side[which] for side in sides)) for name, sides in found.items()}
        for which in (0, 1)
    )
    bare = "bare start"
    rows = [
        [name, str(cpu[name]), number(ratios(cpu[name], cpu[bare]).median), str(wall[name]),
         number(ratios(wall[name], wall[bare]).median)]
        for name in found
    ]  # fmt: skip
    print(f"{python}; programs a second and core, median [least - most]\n{load}")
    print(table(("", "by CPU time", "of bare", "by wall clock", "of bare"), rows))
    for name in list(found)[1:]:
        print(goal_line(f"{name}, by CPU time", ratios(cpu[name], cpu[bare]).median, GOAL))


if __name__ == "__main__":
    main()
