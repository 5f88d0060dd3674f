"""A real HTTP server on loopback that answers each request with what a test wrote down."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

HANGS = b"hangs"
CLOSES = b"closes"


@dataclass
class ChatServer:
    """answers: of the requests, in order, and the last one of all further ones. asked: the bodies of the requests.
    headers: of the requests, in lower case. most: calls that ran at one time. begun: is released by
    each call. held: answers wait for it."""

    answers: list[bytes]
    asked: list[Any] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    running: int = 0
    most: int = 0
    begun: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    held: asyncio.Event = field(default_factory=asyncio.Event)
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[1:-2]
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in head)}
        self.headers.append(headers)
        self.asked.append(json.loads(await reader.readexactly(int(headers["content-length"]))))
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        self.running += 1
        self.most = max(self.most, self.running)
        self.begun.release()
        try:
            await self.held.wait()
        finally:
            self.running -= 1
        if answer == HANGS:
            await reader.read()
        if answer in (HANGS, CLOSES):
            return False
        writer.write(answer)
        await writer.drain()
        return True


def answer(status: int, body: bytes, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} said", f"content-length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


def says(text: Any) -> bytes:
    return answer(200, json.dumps({"choices": [{"message": {"role": "assistant", "content": text}}]}).encode())


@asynccontextmanager
async def chat_server(answers: Sequence[bytes], *, held: bool = False) -> AsyncIterator[ChatServer]:
    made = ChatServer(list(answers))
    if not held:
        made.held.set()
    server = await asyncio.start_server(made.serve, "127.0.0.1")
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    try:
        yield made
    finally:
        server.close()
