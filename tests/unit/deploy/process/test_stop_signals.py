"""Signals while a run goes on."""

import asyncio
import os
import signal
from contextlib import ExitStack, nullcontext

import pytest

from asyncrl.deploy.process.stop_signals import SIGNALS, STOPPING, StopSignals


async def heard(number: signal.Signals) -> None:
    """A signal to this process, and the turns of the loop in which its handler runs."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", SIGNALS)
async def test_without_an_end_in_order_the_first_signal_says_so_and_abandons_the_work(number: signal.Signals) -> None:
    said: list[str] = []
    with StopSignals(said.append) as interrupts, pytest.raises(asyncio.CancelledError):
        await heard(number)
    assert interrupts.abandoned == "interrupted"
    assert said == [STOPPING]


@pytest.mark.parametrize("in_order", [False, True])
async def test_the_second_signal_hurries_and_the_first_does_not(in_order: bool) -> None:
    hurried: list[str] = []
    with StopSignals(print) as interrupts, ExitStack() as scope:
        interrupts.hurry = lambda: hurried.append("hurry")
        if in_order:
            scope.enter_context(interrupts.ending_in_order(lambda: None))
            await heard(signal.SIGINT)
        else:
            with pytest.raises(asyncio.CancelledError):
                await heard(signal.SIGINT)
        assert hurried == []
        with pytest.raises(asyncio.CancelledError) if in_order else nullcontext():
            await heard(signal.SIGINT)
        assert hurried == ["hurry"]


async def test_the_first_signal_ends_in_order_and_the_second_abandons() -> None:
    asked: list[str] = []
    with StopSignals(print) as interrupts, interrupts.ending_in_order(lambda: asked.append("end")):
        await heard(signal.SIGINT)
        assert (asked, interrupts.abandoned) == (["end"], "")
        with pytest.raises(asyncio.CancelledError):
            await heard(signal.SIGINT)
    assert asked == ["end"]
    assert interrupts.abandoned == "interrupted a second time"


@pytest.mark.parametrize(
    ("seconds", "number", "counts"),
    [(0.9, signal.SIGTERM, False), (1.1, signal.SIGTERM, True), (0.1, signal.SIGINT, True)],
)
async def test_a_sigterm_right_after_a_signal_is_its_echo(seconds: float, number: signal.Signals, counts: bool) -> None:
    now = [7.0]
    with StopSignals(print, lambda: now[0]) as interrupts, interrupts.ending_in_order(lambda: None):
        await heard(signal.SIGTERM)
        now[0] += seconds
        with pytest.raises(asyncio.CancelledError) if counts else nullcontext():
            await heard(number)
    assert interrupts.abandoned == ("interrupted a second time" if counts else "")


async def test_what_is_abandoned_is_cancelled_once_so_that_it_can_clean_up() -> None:
    with StopSignals(print) as interrupts:
        with pytest.raises(asyncio.CancelledError):
            await heard(signal.SIGINT)
        interrupts.abandon("too late")
        await heard(signal.SIGINT)
        assert interrupts.abandoned == "interrupted"


async def test_the_handlers_are_gone_afterwards() -> None:
    with StopSignals(print):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
