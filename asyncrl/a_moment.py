"""What can wait gives way to a step that was just sent."""

import asyncio

A_MOMENT = 0.003
"""Seconds. Else all that a finished step sets in motion (draws, questions for health, the next look ahead) would fill
the processor at the very time when the trainer's process wants to begin the next one. Rows are released at once."""


async def a_moment() -> None:
    await asyncio.sleep(A_MOMENT)
