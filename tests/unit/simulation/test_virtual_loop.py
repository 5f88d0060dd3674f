import asyncio
import socket
from typing import cast

import pytest

from asyncrl.simulation import virtual_loop


def test_time_jumps_to_the_next_timer() -> None:
    async def main() -> list[tuple[str, float]]:
        loop = asyncio.get_running_loop()
        seen = []

        async def wake(name: str, after: float) -> None:
            await asyncio.sleep(after)
            seen.append((name, loop.time()))

        async with asyncio.TaskGroup() as tasks:
            for name, after in (("day", 86400.0), ("second", 1.0), ("hour", 3600.0)):
                tasks.create_task(wake(name, after))
        return seen

    assert virtual_loop.run(main()) == [("second", 1.0), ("hour", 3600.0), ("day", 86400.0)]


def test_timeouts_work_unchanged() -> None:
    async def main() -> float:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(30):
                await asyncio.sleep(31)
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(main()) == pytest.approx(30)


def test_work_that_is_ready_takes_no_time() -> None:
    async def main() -> float:
        for _ in range(1000):
            await asyncio.sleep(0)
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(main()) == 0.0


def test_a_wait_shorter_than_the_clock_can_tell_still_ends() -> None:
    async def main() -> float:
        await asyncio.sleep(1e9)
        await asyncio.sleep(1e-12)
        return asyncio.get_running_loop().time()

    assert virtual_loop.run(main()) >= 1e9


def test_a_deadlock_names_the_pending_tasks() -> None:
    async def forever() -> None:
        await asyncio.Event().wait()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(forever(), name="the one that hangs")
            await asyncio.sleep(2)

    with pytest.raises(virtual_loop.Deadlock, match=r"virtual time 2; .*the one that hangs in .*forever") as caught:
        virtual_loop.run(main())
    assert "main" in str(caught.value)


def test_tasks_that_run_for_ever_while_no_time_passes_are_told() -> None:
    async def busy() -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    with pytest.raises(virtual_loop.Livelock):
        virtual_loop.run(busy())


def test_time_that_is_skipped_makes_timers_due() -> None:
    async def main() -> float:
        loop = cast(virtual_loop.VirtualLoop, asyncio.get_running_loop())
        async with asyncio.timeout(10):
            loop.skip(8)
            await asyncio.sleep(1)
        return loop.time()

    assert virtual_loop.run(main()) == 9


def test_a_local_socket_that_can_be_read_is_read_before_time_passes() -> None:
    async def main() -> tuple[bytes, float]:
        loop = asyncio.get_running_loop()
        reading, writing = socket.socketpair()
        with reading, writing:
            reading.setblocking(False)
            writing.send(b"here")
            async with asyncio.timeout(10):
                return await loop.sock_recv(reading, 9), loop.time()

    assert virtual_loop.run(main()) == (b"here", 0.0)


def test_a_socket_becomes_readable_while_a_task_waits_for_it() -> None:
    async def main() -> tuple[bytes, float]:
        loop = asyncio.get_running_loop()
        reading, writing = socket.socketpair()
        with reading, writing:
            reading.setblocking(False)
            loop.call_later(3, writing.send, b"later")
            async with asyncio.timeout(10):
                return await loop.sock_recv(reading, 9), loop.time()

    assert virtual_loop.run(main()) == (b"later", 3.0)
