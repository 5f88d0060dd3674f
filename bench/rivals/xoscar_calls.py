"""Measures xoscar: the main process of a pool calls an actor in a sub-process."""

import asyncio
from importlib.metadata import version

import call_timing
import numpy as np
import xoscar
from xoscar_calls_actor import XoscarSink


async def main() -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    async with pool:
        where = xoscar.allocate_strategy.ProcessIndex(1)
        sink = await xoscar.create_actor(XoscarSink, address=pool.external_address, allocate_strategy=where)
        batch = call_timing.rollout()
        large = {"data": np.ones(call_timing.LARGE, np.uint8)}
        payload = b"x" * 64
        for _ in call_timing.rounds({"xoscar": version("xoscar")}):
            results = call_timing.percentiles(await call_timing.seconds_of_async(lambda: sink.echo(payload), 300))
            results["calls_per_s"] = 960 / await call_timing.in_window(lambda: sink.echo(payload), 960, 64)
            one_by_one = await call_timing.seconds_of_async(lambda: sink.take(batch), 20)
            results["batch_ms"] = call_timing.milliseconds(one_by_one)
            seconds = await call_timing.in_window(lambda: sink.take(batch), call_timing.PIPELINED)
            results["piped_gb_s"] = call_timing.PIPELINED * call_timing.size(batch) / seconds / 1e9
            of_large = await call_timing.seconds_of_async(lambda: sink.take(large), 3)
            results["large_gb_s"] = call_timing.gigabytes_per_second(of_large)
            call_timing.report(results)


if __name__ == "__main__":
    asyncio.run(main())
