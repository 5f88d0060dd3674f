"""The environment of the built-in task `dialogue`: the other speaker of a recorded conversation."""

from typing import Any

from asyncrl.environments.observation import Observation


class Dialogue:
    """Begins with the prompt of a row, and says the row's `lines` one after the other, whatever the policy answers; a
    person wrote them to somebody else. The conversation ends after the answer to the last one. Rewards come from
    functions."""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._lines = [str(line) for line in row.get("lines", ())]
        return Observation(row["prompt"])

    async def step(self, message: str) -> Observation:
        if not self._lines:
            return Observation("", done=True)
        return Observation(self._lines.pop(0))
