"""Defines the actor of xoscar_calls.py, so that its sub-process can import it."""

import timed_rounds
import xoscar


class Sink(xoscar.Actor):
    async def echo(self, payload: bytes) -> bytes:
        return payload

    async def take(self, tensors: timed_rounds.Tensors) -> int:
        return timed_rounds.last_values(tensors.values())
