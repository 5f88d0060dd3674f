"""Signals while a run goes on."""

import asyncio
import os
import signal
from collections.abc import Callable
from contextlib import ExitStack, nullcontext

import pytest

from asyncrl.deploy.process import interrupts
from asyncrl.deploy.process.interrupts import SIGNALS, STOPPING, StopSignals


class WithOldHandler:
    """Restores this handler of a signal where a loop restores Python's, which would end the tests."""

    def __init__(self, handler: Callable[[int, object], None]) -> None:
        self._handler = handler

    def remove_signal_handler(self, number: signal.Signals) -> bool:
        asyncio.get_running_loop().remove_signal_handler(number)
        signal.signal(number, self._handler)
        return True


async def heard(number: signal.Signals) -> None:
    """A signal to this process, and the turns of the loop in which its handler runs."""
    os.kill(os.getpid(), number)
    for _ in range(3):
        await asyncio.sleep(0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
async def test_without_an_end_in_order_the_first_signal_says_so_and_abandons_the_work(number: signal.Signals) -> None:
    assert number in SIGNALS, "another signal would end this process"
    said: list[str] = []
    with StopSignals(said.append) as signals, pytest.raises(asyncio.CancelledError):
        await heard(number)
    assert signals.abandoned == "interrupted"
    assert said == [STOPPING]


@pytest.mark.parametrize("in_order", [False, True])
async def test_the_second_signal_hurries_and_the_first_does_not(in_order: bool) -> None:
    hurried: list[str] = []
    with StopSignals(print) as signals, ExitStack() as scope:
        signals.hurry = lambda: hurried.append("hurry")
        if in_order:
            scope.enter_context(signals.ending_in_order(lambda: None))
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
    with StopSignals(print) as signals, signals.ending_in_order(lambda: asked.append("end")):
        await heard(signal.SIGINT)
        assert (asked, signals.abandoned) == (["end"], "")
        with pytest.raises(asyncio.CancelledError):
            await heard(signal.SIGINT)
    assert asked == ["end"]
    assert signals.abandoned == "interrupted a second time"


async def test_a_run_that_ends_by_itself_in_order_takes_the_first_signal_for_the_same_wish() -> None:
    asked: list[str] = []
    with StopSignals(print) as signals:
        assert not signals.end_in_order(), "nothing can end in order yet"
        with signals.ending_in_order(lambda: asked.append("end")):
            assert signals.end_in_order()
        signals.receive(signal.SIGTERM)
        assert (asked, signals.abandoned) == (["end"], "")
        signals.receive(signal.SIGINT)
        assert signals.abandoned == "interrupted a second time"
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(10)


@pytest.mark.parametrize(
    ("echo", "number", "counts"),
    [(60.0, signal.SIGTERM, False), (0.0, signal.SIGTERM, True), (60.0, signal.SIGINT, True)],
)
async def test_a_sigterm_right_after_a_signal_is_its_echo(
    echo: float, number: signal.Signals, counts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(interrupts, "ECHO", echo)
    with StopSignals(print) as signals, signals.ending_in_order(lambda: None):
        await heard(signal.SIGTERM)
        with pytest.raises(asyncio.CancelledError) if counts else nullcontext():
            await heard(number)
    assert signals.abandoned == ("interrupted a second time" if counts else "")


async def test_what_is_abandoned_is_cancelled_once_so_that_it_can_clean_up() -> None:
    with StopSignals(print) as signals:
        with pytest.raises(asyncio.CancelledError):
            await heard(signal.SIGINT)
        signals.abandon("too late")
        await heard(signal.SIGINT)
        assert signals.abandoned == "interrupted"


@pytest.mark.parametrize("number", SIGNALS)
async def test_a_signal_right_after_an_interrupted_run_does_not_keep_it_from_saying_how_to_go_on(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    before: list[int] = []
    for echo, received in ((60.0, []), (0.0, [number])):
        monkeypatch.setattr(interrupts, "ECHO", echo)
        with StopSignals(print) as signals, signals.ending_in_order(lambda: None):
            await heard(signal.SIGINT)
            monkeypatch.setattr(signals, "_loop", WithOldHandler(lambda number, _: before.append(number)))
        await heard(number)
        assert before == received
    asyncio.get_running_loop().add_signal_handler(number, print)
    asyncio.get_running_loop().remove_signal_handler(number)


async def test_the_handlers_are_gone_afterwards() -> None:
    with StopSignals(print):
        assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


async def test_an_interrupt_from_elsewhere_ends_in_order_like_ctrl_c() -> None:
    asked: list[str] = []
    work = asyncio.current_task()
    assert work is not None
    with StopSignals(print) as signals, signals.ending_in_order(lambda: asked.append("end")):
        interrupts.interrupt(work)
        assert (asked, signals.abandoned) == (["end"], "")
        interrupts.interrupt(work)
        assert signals.abandoned == "interrupted a second time"
        with pytest.raises(asyncio.CancelledError):
            await asyncio.sleep(0)


async def test_a_signal_that_nohup_ignores_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals(print) as signals:
            await heard(signal.SIGHUP)
            assert signals.abandoned == ""
    finally:
        signal.signal(signal.SIGHUP, before)
