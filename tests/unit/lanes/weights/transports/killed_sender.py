"""A trainer's ends in a process of their own, which the test kills in the middle of version 1."""

import asyncio
import json
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path

from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.weights.transports.weight_stream import StreamSender
from asyncrl.protocols.messages import Published
from tests.unit.lanes.weights.transports.sites import Site, open_site

KILLED = ("shm", "tcp", "file", "gloo")
"""Transports that a process of its own can have without a device."""


async def begin_second(site: Site) -> Published:
    """Writes version 1 and stalls it, over a network behind its first part."""
    published = site.write(1)
    if isinstance(site.sender, StreamSender):
        await site.sender.server.held[1].chunk(0, None)
    site.stall(published)
    return published


def tell(versions: list[Published]) -> None:
    sys.stdout.write(json.dumps([asdict(published) for published in versions]) + "\n")
    sys.stdout.flush()


async def main(folder: Path, keys: CurveKeys) -> None:
    async with AsyncExitStack() as ends:
        sites = [await ends.enter_async_context(open_site(name, folder / name, keys=keys)) for name in KILLED]
        tell([site.write(0) for site in sites])
        await asyncio.to_thread(sys.stdin.readline)
        tell([await begin_second(site) for site in sites])
        await asyncio.to_thread(sys.stdin.readline)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1]), CurveKeys(sys.argv[2], sys.argv[3])))
