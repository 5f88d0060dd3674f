"""Serves calls of reward functions inside a child process, which its guard starts and ends (guard_program.py).
The first message in has the functions, the first message out how many calls of each may overlap, or the user's
mistake. Then calls come in and results go out."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from functools import partial
from typing import Any

import msgpack

from asyncrl.children.child_messages import greeting, open_pipes, receive, send
from asyncrl.children.sandbox import SandboxError
from asyncrl.errors import ConfigError
from asyncrl.protocols.named_columns import Columns
from asyncrl.protocols.prompt_row import PromptRow
from asyncrl.rewards.execution.function_call import attempt
from asyncrl.rewards.functions import FunctionSpec, load, overlapping
from asyncrl.rewards.sample import Function, Sample


def plain_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the fields of a message that hold samples: each row once, packed, however many samples share it."""
    rows: dict[bytes, bytes] = {}
    plain = []
    for sample in samples:
        row = PromptRow.of(sample.row).packed
        if row.digest not in rows:
            rows[row.digest] = row.data.tobytes()
        fields = (sample.text, sample.group, sample.member, sample.finish, sample.tokens)
        by_token = (sample.token_ids, sample.token_texts, sample.turn_tokens)
        counts = (sample.given, sample.version, sample.steps, sample.opened)
        plain.append((row.digest, sample.prompt, *fields, sample.turns, sample.turn_rewards, *by_token, *counts))
    return {"rows": list(rows.items()), "samples": plain}


def samples_of(message: dict[str, Any]) -> list[Sample]:
    """Returns the samples of a message, each with a row of its own, because functions may change it."""
    rows = dict(message["rows"])
    found = []
    for digest, prompt, text, *fields in message["samples"]:
        row = Columns(msgpack.unpackb(rows[digest], raw=False, strict_map_key=False))
        found.append(Sample(prompt, text, row, *fields))
    return found


@dataclass(eq=False, slots=True)
class ChildServer:
    """Answers one call after the other; calls of coroutine functions overlap."""

    _calls: asyncio.StreamReader
    _results: int
    _functions: list[tuple[FunctionSpec, Function]] = field(default_factory=list)

    async def serve(self) -> None:
        """Answers calls until the parent closes the pipe."""
        async with asyncio.TaskGroup() as tasks:
            try:
                specs = [FunctionSpec(**plain) for plain in await receive(self._calls)]
                self._send(greeting(specs[0].key, partial(self._load, specs)))
                while True:
                    tasks.create_task(self._answer(await receive(self._calls)))
            except asyncio.IncompleteReadError:
                os._exit(0)  # Calls that still run are not awaited, because the parent has gone.

    def _load(self, specs: Sequence[FunctionSpec]) -> dict[str, Any]:
        self._functions = [(spec, load(spec)) for spec in specs]
        for spec, function in self._functions:
            try:
                getattr(function, "warm_up", bool)()
            except SandboxError as error:
                raise ConfigError(f"{spec.key}: {spec.use}: {error}") from None
        return {"overlapping": [overlapping(function) for _, function in self._functions]}

    async def _answer(self, message: dict[str, Any]) -> None:
        spec, function = self._functions[message["function"]]
        samples = samples_of(message)
        for batch in [samples] if spec.group else [[sample] for sample in samples]:
            results = await attempt(function, batch, spec.group, message["deadline"], by_token=spec.by_token)
            self._send({"call": message["call"], "results": [astuple(result) for result in results]})

    def _send(self, message: dict[str, Any]) -> None:
        send(self._results, message)


async def serve_pipes() -> None:
    """Serves calls until the worker closes the pipe."""
    calls, results = await open_pipes()
    await ChildServer(calls, results).serve()
