"""Episodes of an OpenEnv server: each has a session of its own, over a WebSocket."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from asyncrl.environments.adapters.packages import after_prompt, package
from asyncrl.environments.observation import Observation
from asyncrl.errors import ConfigError, EnvironmentFailed
from asyncrl.protocols.answer_text import Several, json_objects, split_thoughts

LARGEST = 2**22
"""Bytes of a message of the server: more than any model reads."""
UNREADABLE = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors about the action, which the policy wrote."""
UNSHOWN = "metadata"
"""The field of every observation that says nothing about the world."""
CLOSING = 5.0
"""Seconds that the server has to answer the end of a session."""


class OpenEnvClient:
    """Plays with the OpenEnv server at `url`, http or https. action: the field of the action that takes the answer as
    it is; "": the last JSON object of the answer is the whole action. shown: the field of the observation that the
    policy sees; default: its only field that is a text, or else all of it as JSON. reset: arguments of the
    environment's `reset` besides the seed. columns: of the row that are arguments too. seconds: for a connection and
    for an answer."""

    def __init__(
        self,
        url: str,
        action: str = "message",
        shown: str = "",
        reset: Mapping[str, Any] | None = None,
        columns: Sequence[str] = (),
        seconds: float = 9.0,
    ) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError('environment.use is "openenv:" and a URL, such as "openenv:http://localhost:8000"')
        self._url = url
        self._socket_url = f"ws{url.removeprefix('http').rstrip('/')}/ws"
        self._action = action
        self._shown = shown
        self._arguments = dict(reset or {})
        self._columns = tuple(columns)
        self._seconds = seconds
        self._socket: Any = None

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Opens a session: the prompt of the row, then the first observation."""
        if missing := [name for name in self._columns if name not in row]:
            raise ConfigError(
                f"environment.options.columns: the row has no column {missing[0]}; it has {', '.join(row)}"
            )
        await self.close()
        self._socket = await self._connected()
        arguments = self._arguments | {name: row[name] for name in self._columns} | {"seed": seed % 2**31}
        first = await self._answer("reset", arguments)
        return Observation(after_prompt(row.get("prompt", ""), self._text(first["observation"])))

    async def step(self, message: str, opened: bool = False) -> Observation:
        """Takes the action of the answer. An action that the server cannot read is said, and costs a turn."""
        try:
            answer = split_thoughts(message, opened)[1]
            action = {self._action: answer} if self._action else _object_in(answer)
            answered = await self._answer("step", action)
        except _UnreadableAction as mistake:
            return Observation(f"Your answer is no action: {mistake}")
        reward = float(answered.get("reward") or 0.0)
        done = bool(answered.get("done"))
        if done:
            await self.close()
        return Observation(self._text(answered["observation"]), reward, done)

    async def close(self) -> None:
        """Ends the session."""
        if self._socket is not None:
            socket = self._socket
            self._socket = None
            await socket.close()

    async def _connected(self) -> Any:
        client = package("websockets.asyncio.client")
        errors = (OSError, TimeoutError, package("websockets.exceptions").WebSocketException)
        try:
            return await client.connect(
                self._socket_url, open_timeout=self._seconds, close_timeout=CLOSING, max_size=LARGEST
            )
        except errors as error:
            raise ConfigError(
                f"environment.use: the OpenEnv server {self._url} cannot be reached: {error or type(error).__name__}"
            ) from None

    async def _answer(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Sends a message and returns the data of the answer. Without one it ends the session and raises
        EnvironmentFailed."""
        if self._socket is None:
            raise EnvironmentFailed(f"the session at {self._url} has ended")
        try:
            return _observed(await self._received(kind, data), kind)
        except EnvironmentFailed as error:
            await self.close()
            raise EnvironmentFailed(f"the OpenEnv server {self._url} {error}") from None

    async def _received(self, kind: str, data: Mapping[str, Any]) -> Any:
        closed = package("websockets.exceptions").ConnectionClosed
        try:
            async with asyncio.timeout(self._seconds):
                with suppress(closed):  # A server that refuses a session says why before it closes.
                    await self._socket.send(json.dumps({"type": kind, "data": data}))
                return json.loads(await self._socket.recv())
        except TimeoutError:
            raise EnvironmentFailed(f"did not answer {kind} within {self._seconds:g} s") from None
        except (closed, ValueError, RecursionError) as error:
            raise EnvironmentFailed(f"gave no answer to {kind}: {error}") from None

    def _text(self, observation: dict[str, Any]) -> str:
        if self._shown:
            if self._shown not in observation:
                raise ConfigError(
                    f"environment.options.shown: the observation has no field {self._shown}; it has "
                    f"{', '.join(observation)}"
                )
            shown = observation[self._shown]
            return shown if isinstance(shown, str) else json.dumps(shown, ensure_ascii=False)
        rest = {name: value for name, value in observation.items() if name != UNSHOWN}
        texts = [value for value in rest.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(rest, ensure_ascii=False)


def _observed(answered: Any, kind: str) -> dict[str, Any]:
    """Returns the data of an answer to a message of this kind."""
    match answered:
        case {"type": "observation", "data": {"observation": dict()} as found}:
            return dict(found)
        case {"type": "error", "data": {"code": str(code), **about}} if kind == "step" and code in UNREADABLE:
            raise _UnreadableAction(_mistakes(about))
        case {"type": "error", "data": {"code": code, **about}}:
            raise EnvironmentFailed(f"reports {code} for {kind}: {about.get('message', about)!s:.500}")
    raise EnvironmentFailed(f"answered {kind} with what is no observation: {answered!r:.200}")


class _UnreadableAction(Exception):
    """Reports an action that is not what the server takes."""


def _object_in(message: str) -> dict[str, Any]:
    """Returns the last JSON object of an answer."""
    objects = [found for found, _ in json_objects(message)]
    if not objects:
        raise _UnreadableAction("it has no JSON object")
    return {name: _as_sent(value, name) for name, value in objects[-1].items()}


def _as_sent(value: Any, where: str) -> Any:
    """Returns a value whose numbers are those of JSON libraries."""
    if isinstance(value, Several):
        raise _UnreadableAction(f"its JSON object has {where} twice")
    if isinstance(value, dict):
        return {name: _as_sent(each, f"{where}.{name}") for name, each in value.items()}
    if isinstance(value, list):
        return [_as_sent(each, where) for each in value]
    return float(value) if isinstance(value, Decimal) else value


def _mistakes(about: Mapping[Any, Any]) -> str:
    """Returns what a server says about an action, by field where it does."""
    errors = about.get("errors")
    named = [each for each in errors if isinstance(each, Mapping)] if isinstance(errors, list) else []
    fields = [f"{_field(each.get('loc'))}: {each.get('msg', '')}" for each in named]
    return "; ".join(fields) or str(about.get("message", "it is refused"))


def _field(path: Any) -> str:
    return ".".join(map(str, path)) if isinstance(path, list) else str(path or "the action")
