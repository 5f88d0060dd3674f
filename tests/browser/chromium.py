"""A headless Chromium that a test drives by the DevTools protocol over two pipes."""

import asyncio
import base64
import itertools
import json
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome") or ""
SECONDS = 30.0
"""Seconds that the browser may take for anything, on a busy machine."""
FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--remote-debugging-pipe"),
    *("--window-size=1100,900", "--force-prefers-reduced-motion"),
)


class Tab:
    """One page. requests: addresses that it asked for. complaints: errors that it wrote to its console."""

    def __init__(self, answers: asyncio.StreamReader, calls: int) -> None:
        self._answers = answers
        self._calls = calls
        self._numbers = itertools.count(1)
        self._waits: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._session: dict[str, str] = {}
        self.requests: list[str] = []
        self.complaints: list[str] = []

    async def follow(self) -> None:
        """Reads what the browser says until it ends."""
        while data := await self._answers.readuntil(b"\0"):
            said = json.loads(data[:-1])
            if (wait := self._waits.pop(said.get("id", 0), None)) is not None:
                wait.set_result(said)
            elif said.get("method") == "Network.requestWillBeSent":
                self.requests.append(said["params"]["request"]["url"])
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.complaints.append(said["params"]["entry"]["text"])
            elif said.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(said["params"]["exceptionDetails"]))

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._waits[number] = wait = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params, **self._session}
        os.write(self._calls, json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(SECONDS):
            said = await wait
        assert "error" not in said, f"{method}: {said['error']}"
        return dict(said["result"])

    async def attach(self) -> None:
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Log", "Runtime"):
            await self.call(f"{domain}.enable")

    async def open(self, url: str) -> None:
        await self.call("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    async def until(self, condition: str) -> None:
        """Waits until an expression of JavaScript is true."""
        look = f"const look = () => document.body && ({condition}) ? done(true) : setTimeout(look, 10); look();"
        assert await self.value(f"new Promise(done => {{ {look} }})")

    async def text(self) -> str:
        return str(await self.value("document.body.innerText"))

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            text = {"text": key} if kind == "keyDown" and len(key) == 1 else {}
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, **text)

    async def key(self, key: str) -> None:
        """Presses a key that does what it does for a person: moves the focus, activates, changes a number."""
        codes = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowUp": 38, "ArrowDown": 40}
        text = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
        code = {"code": key, "windowsVirtualKeyCode": codes[key]} if key in codes else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text, **code)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, **code)

    async def screenshot(self, path: Path) -> None:
        data = (await self.call("Page.captureScreenshot"))["data"]
        await asyncio.to_thread(path.write_bytes, base64.b64decode(data))


@asynccontextmanager
async def browser_tab(profile: Path) -> AsyncIterator[Tab]:
    """Starts Chromium with an empty profile, and yields a tab."""
    to_browser, calls = os.pipe()
    answers, from_browser = os.pipe()
    loop = asyncio.get_running_loop()
    pipe = os.fdopen(answers, "rb")
    reader = asyncio.StreamReader(limit=2**26)
    transport, _ = await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), pipe)
    script = f'exec "$0" "$@" 3<&{to_browser} 4>&{from_browser}'
    command = ("bash", "-c", script, PROGRAM, *FLAGS, f"--user-data-dir={profile}", "about:blank")
    null = asyncio.subprocess.DEVNULL
    process = await asyncio.create_subprocess_exec(
        *command, stdout=null, stderr=null, pass_fds=(to_browser, from_browser)
    )
    for end in (to_browser, from_browser):
        os.close(end)
    tab = Tab(reader, calls)
    following = asyncio.ensure_future(tab.follow())
    try:
        await tab.attach()
        yield tab
    finally:
        following.cancel()
        await asyncio.wait([following])
        process.kill()
        await process.wait()
        transport.close()
        os.close(calls)
