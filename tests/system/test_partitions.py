"""Connections between hosts of which one receives nothing for a while."""

import json
import sys
import time
from pathlib import Path

import pytest

from asyncrl.lanes.control.auth import CurveKeys
from tests.network_hosts import network_hosts, why_no_hosts

sys.path.insert(0, str(Path(__file__).parent))
from watching import wait_until

pytestmark = [pytest.mark.fleet, pytest.mark.kills]

PROGRAM = """
import asyncio, json, sys
from asyncrl.lanes.control.auth import CurveKeys
from asyncrl.lanes.control.zmq_wire import ZmqWire

async def main():
    wire = ZmqWire(CurveKeys(**json.loads(sys.argv[1])))
    if sys.argv[2] == "listen":
        listener = wire.listen("tcp://10.77.0.1:7000")
        print("listens", flush=True)
        await listener.pump(lambda message: listener.offer(*message))
    caller = wire.connect("tcp://10.77.0.1:7000")
    caller.offer([b"hello"])
    print("connects", flush=True)
    await caller.pump(lambda frames: print("answered", flush=True))

asyncio.run(main())
"""


def test_a_host_that_comes_back_is_reached_within_two_seconds(tmp_path: Path) -> None:
    """The kernel alone would send its next packet after four more seconds."""
    if why := why_no_hosts():
        pytest.skip(why)
    keys = CurveKeys.fresh()
    command = [sys.executable, "-c", PROGRAM, json.dumps({"public": keys.public, "secret": keys.secret})]
    served = tmp_path / "served"
    called = tmp_path / "called"
    with network_hosts(tmp_path, 2) as hosts:
        hosts.start(1, [*command, "listen"], served)
        wait_until(lambda: "listens" in served.read_text(), served.read_text)
        hosts.lose(1, 1)
        hosts.start(2, [*command, "call"], called)
        wait_until(lambda: "connects" in called.read_text(), called.read_text)
        time.sleep(8.6)  # The time without packets is what is tested.
        hosts.lose_no_more(1, 1)
        wait_until(lambda: "answered" in called.read_text(), called.read_text, 2.0)
