"""Serves calls of reward functions inside a child process, which its guard starts and ends (guard_process.py).
The first message in has the functions, the first message out which of them are coroutine functions, or the user's
mistake. Then calls come in and results go out. A message is a length of four bytes, then MessagePack."""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import astuple, dataclass, field
from typing import Any

import msgpack

from asyncrl.errors import ConfigError, WireError
from asyncrl.protocols.prompt_row import PromptRow
from asyncrl.rewards.execution.function_call import attempt, trace
from asyncrl.rewards.execution.guard_process import STDERR, STDIN, STDOUT
from asyncrl.rewards.functions import FunctionSpec, is_concurrent, load
from asyncrl.rewards.sample import Columns, Function, Sample

LARGEST = 64 * 2**20
"""Bytes; a group of a thousand samples of 16k characters fits twice."""


def packed(message: Any) -> bytes:
    """Returns the frame of a message; raises WireError when it is too large."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > LARGEST:
        raise WireError(f"a message to or from a reward child has {len(body)} bytes; at most {LARGEST} are sent")
    return len(body).to_bytes(4, "little") + body


def plain_samples(samples: Sequence[Sample]) -> dict[str, Any]:
    """Returns the fields of a message that hold samples: each row once, packed, however many samples share it."""
    rows: dict[bytes, bytes] = {}
    plain = []
    for sample in samples:
        row = PromptRow.of(sample.row).packed
        if row.digest not in rows:
            rows[row.digest] = row.data.tobytes()
        fields = (sample.text, sample.group, sample.member, sample.finish, sample.tokens)
        plain.append((row.digest, sample.prompt, *fields))
    return {"rows": list(rows.items()), "samples": plain}


def samples_of(message: dict[str, Any]) -> list[Sample]:
    """Returns the samples of a message, each with a row of its own, because functions may change it."""
    rows = dict(message["rows"])
    found = []
    for digest, prompt, text, *fields in message["samples"]:
        row = Columns(msgpack.unpackb(rows[digest], raw=False, strict_map_key=False))
        found.append(Sample(prompt, text, row, *fields))
    return found


async def receive(reader: asyncio.StreamReader) -> Any:
    """Reads the next message; raises asyncio.IncompleteReadError at the end, WireError for anything malformed."""
    size = int.from_bytes(await reader.readexactly(4), "little")
    if size > LARGEST:
        raise WireError(f"a frame of {size} bytes was announced; at most {LARGEST} are sent")
    body = await reader.readexactly(size)
    try:
        return msgpack.unpackb(body, raw=False, strict_map_key=False)
    except (ValueError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise WireError(f"a frame of {size} bytes that is no MessagePack: {error!r:.200}") from error


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
                self._load(await receive(self._calls))
                while True:
                    tasks.create_task(self._answer(await receive(self._calls)))
            except asyncio.IncompleteReadError:
                os._exit(0)  # Calls that still run are not awaited, because the parent has gone.

    def _load(self, specs: list[dict[str, Any]]) -> None:
        try:
            self._functions = [(spec, load(spec)) for spec in (FunctionSpec(**plain) for plain in specs)]
        except ConfigError as error:
            self._send({"mistake": str(error)})
        except Exception as error:  # importing the user's file runs the user's code
            mistake = f"{specs[0]['key']} could not be loaded: {type(error).__name__}: {error}\n{trace(error)}"
            self._send({"mistake": mistake})
        else:
            self._send({"concurrent": [is_concurrent(function) for _, function in self._functions]})

    async def _answer(self, message: dict[str, Any]) -> None:
        spec, function = self._functions[message["function"]]
        samples = samples_of(message)
        for batch in [samples] if spec.group else [[sample] for sample in samples]:
            results = await attempt(function, batch, spec.group, message["deadline"])
            self._send({"call": message["call"], "results": [astuple(result) for result in results]})

    def _send(self, message: dict[str, Any]) -> None:
        """Blocks while the pipe is full; the parent always reads."""
        rest = memoryview(packed(message))
        while rest:
            rest = rest[os.write(self._results, rest) :]


async def serve_pipes() -> None:
    """Serves copies of stdin and stdout; the user's code then reads nothing and prints to stderr."""
    calls, results = os.dup(STDIN), os.dup(STDOUT)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, STDIN)
    os.close(nothing)
    os.dup2(STDERR, STDOUT)
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, os.fdopen(calls, "rb"))
    await ChildServer(reader, results).serve()
