"""Signals while a run goes on."""

import asyncio
import os
import signal

import pytest

from asyncrl.deploy.interrupts import SIGNALS, Interrupts


async def heard(number: signal.Signals) -> None:
    """A signal to this process, and the turns of the loop in which its handler runs."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", SIGNALS)
async def test_without_an_end_in_order_the_first_signal_abandons_the_work(number: signal.Signals) -> None:
    with Interrupts() as interrupts, pytest.raises(asyncio.CancelledError):
        await heard(number)
    assert interrupts.abandoned == "interrupted"


async def test_the_first_signal_ends_in_order_and_the_second_abandons() -> None:
    asked: list[str] = []
    with Interrupts() as interrupts, interrupts.ending_in_order(lambda: asked.append("end")):
        await heard(signal.SIGINT)
        assert (asked, interrupts.abandoned) == (["end"], "")
        with pytest.raises(asyncio.CancelledError):
            await heard(signal.SIGINT)
    assert asked == ["end"]
    assert interrupts.abandoned == "interrupted a second time"


async def test_what_is_abandoned_is_cancelled_once_so_that_it_can_clean_up() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(asyncio.CancelledError):
            await heard(signal.SIGINT)
        interrupts.abandon("too late")
        await heard(signal.SIGINT)
        assert interrupts.abandoned == "interrupted"


async def test_the_handlers_are_gone_afterwards() -> None:
    with Interrupts():
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
