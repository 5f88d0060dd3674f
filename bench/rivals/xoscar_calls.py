"""Measures xoscar: the main process of a pool calls an actor in a sub-process."""

import asyncio
from importlib.metadata import version

import numpy as np
import timed_rounds
import xoscar
from xoscar_calls_actor import Sink


async def main() -> None:
    pool = await xoscar.create_actor_pool("127.0.0.1", n_process=1)
    async with pool:
        where = xoscar.allocate_strategy.ProcessIndex(1)
        sink = await xoscar.create_actor(Sink, address=pool.external_address, allocate_strategy=where)
        batch, large, payload = timed_rounds.rollout(), {"data": np.ones(timed_rounds.LARGE, np.uint8)}, b"x" * 64
        for _ in timed_rounds.rounds({"xoscar": version("xoscar")}):
            results = timed_rounds.percentiles(await timed_rounds.seconds_of_async(lambda: sink.echo(payload), 300))
            results["calls_per_s"] = 960 / await timed_rounds.in_window(lambda: sink.echo(payload), 960, 64)
            one_by_one = await timed_rounds.seconds_of_async(lambda: sink.take(batch), 20)
            results["batch_ms"] = timed_rounds.milliseconds(one_by_one)
            seconds = await timed_rounds.in_window(lambda: sink.take(batch), timed_rounds.PIPELINED)
            results["piped_gb_s"] = timed_rounds.PIPELINED * timed_rounds.size(batch) / seconds / 1e9
            of_large = await timed_rounds.seconds_of_async(lambda: sink.take(large), 3)
            results["large_gb_s"] = timed_rounds.gigabytes_per_second(of_large)
            timed_rounds.report(results)


if __name__ == "__main__":
    asyncio.run(main())
