"""A cell of a notebook that trains without torch: it runs inside an event loop, and SIGINT raises KeyboardInterrupt.

python notebook_cell.py RUN_DIRECTORY
"""

import asyncio
import sys

from faulty_run import use_standins

import asyncrl

ROWS = [{"prompt": f"count from {number}:"} for number in range(40)]


async def cell() -> None:
    asyncrl.train(
        model="warmed:reverse",
        prompts=ROWS,
        reward="torchless_task:even",
        steps=1_000_000,
        run_dir=sys.argv[1],
        task={"prompts_per_step": 3, "samples_per_prompt": 4},
        generation={"max_new_tokens": 12},
        training={"checkpoint_every": 0},
    )


if __name__ == "__main__":
    use_standins()
    try:
        asyncio.new_event_loop().run_until_complete(cell())  # Not asyncio.run, which has a handler of SIGINT.
    except KeyboardInterrupt:
        sys.stdout.write("the cell was interrupted\n")
