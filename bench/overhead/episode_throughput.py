"""Episodes a second with many in flight, in a child beside the same class in this loop: `asyncrl-bench episodes`.

    bare      gather(reset, step, step, step) of the class, in this process
    child     the same turns through `EpisodePool`, each with a pause in which the policy would speak

Rows, which the service of environments reads and stores besides, are not in the measurement.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asyncrl.bench.measurements import MachineLoad, RoundValues, at_least, in_turn, number, ratios, table
from asyncrl.concurrency import gather
from asyncrl.environments.episode_pool import EpisodePool, Play
from asyncrl.environments.games import Guess
from asyncrl.environments.loading import EnvironmentSpec
from asyncrl.protocols.prompt_row import PromptRow

ROW = {"prompt": "guess:"}
SAID = ("03", "05", "01", "06", "00")
"""Messages of the policy. The episode goes on after the one that finds the number."""
DEADLINE = 60.0


async def played_bare(number: int) -> None:
    environment = Guess()
    await environment.reset(ROW, number)
    for message in SAID:
        await asyncio.sleep(0)
        await environment.step(message)


async def played_in_child(pool: EpisodePool, number: int) -> None:
    row = PromptRow.of(ROW).packed
    name = (number, 0, 0)
    for turn in range(1, len(SAID) + 1):
        played = await pool.play(Play(name, row, number, SAID[:turn]))
        assert not played.error, played.error
        await asyncio.sleep(0)
    pool.forget([name])


async def timed(episodes: int, play: Callable[[int], Coroutine[Any, Any, None]]) -> float:
    """Plays all episodes at once; returns episodes a second."""
    began = time.monotonic()
    await gather(*(play(number) for number in range(episodes)))
    return episodes / (time.monotonic() - began)


async def timed_child(episodes: int, children: int) -> float:
    with tempfile.TemporaryDirectory(prefix="asyncrl-episodes-") as folder:
        async with asyncio.TaskGroup() as tasks:
            pool = EpisodePool(
                EnvironmentSpec("guess"),
                tasks,
                workers=children,
                deadline=DEADLINE,
                start_deadline=DEADLINE,
                printed=Path(folder) / "printed",
                unclosed=print,
            )
            await pool.start()
            try:
                return await timed(episodes, partial(played_in_child, pool))
            finally:
                await pool.stop()


def main(arguments: Sequence[str] = ()) -> None:
    parser = argparse.ArgumentParser("asyncrl-bench episodes", description=__doc__)
    parser.add_argument("--episodes", type=at_least(1), default=1000, help="Number of episodes in flight.")
    parser.add_argument("--children", type=at_least(1), default=1, help="Number of child processes.")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="Number of rounds; both sides take turns.")
    options = parser.parse_args(arguments)
    load = MachineLoad()
    found = in_turn(
        {
            "bare": lambda: asyncio.run(timed(options.episodes, played_bare)),
            "child": lambda: asyncio.run(timed_child(options.episodes, options.children)),
        },
        options.rounds,
    )
    rates = {name: RoundValues(tuple(values)) for name, values in found.items()}
    shares = ratios(rates["child"], rates["bare"])
    turns = RoundValues(tuple(rate * len(SAID) for rate in found["child"]))
    print(f"{options.episodes} episodes of {len(SAID)} turns in flight, a second, median [least - most]\n{load}")
    rows = [["bare", str(rates["bare"]), ""], ["child", str(rates["child"]), number(shares.median)]]
    print(table(("", "episodes", "of bare"), rows))
    print(f"turns a second in children: {turns}")


if __name__ == "__main__":
    main()
