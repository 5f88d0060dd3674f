"""The actor of xoscar_calls.py, where its sub-process can import it."""

import rounds
import xoscar


class Sink(xoscar.Actor):
    async def echo(self, payload: bytes) -> bytes:
        return payload

    async def take(self, tensors: rounds.Tensors) -> int:
        return rounds.last_values(tensors)
