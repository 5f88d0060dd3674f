import asyncio
import threading

from asyncrl.rewards.execution.thread_pool import THREADS, InProcessPool, named
from asyncrl.rewards.sample import Sample


def length(sample: Sample) -> float:
    return 1.0


async def test_functions_of_one_name_have_terms_of_their_own() -> None:
    pool = InProcessPool(named([lambda sample: 0.0, length, lambda sample: 1.0, length]), 1.0)
    assert [spec.name for spec in pool.specs] == ["lambda", "length", "lambda_2", "length_2"]


async def test_calls_that_are_given_up_while_they_wait_are_queued_no_longer() -> None:
    over = threading.Event()

    def waits(sample: Sample) -> float:
        over.wait(20)
        return 1.0

    pool = InProcessPool(named([waits]), 20.0)
    samples = [Sample("p", "t", {}, group=0, member=member, finish="stop", tokens=1) for member in range(THREADS + 3)]
    async with asyncio.timeout(20):
        call = asyncio.ensure_future(pool.run(0, samples))
        for _ in iter(lambda: pool.queued == 3, True):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait([call])
    over.set()
    assert pool.queued == 0
