"""Episodes with tools: results in order, within limits, whatever the tools do."""

import asyncio
import dataclasses
import enum
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments import Observation
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.environments.tools import FORMS, ToolCall, ToolEnvironment
from asyncrl.environments.tools.tool_environment import OutOfTime, as_text, assistant_message, cut, interrupted_after
from asyncrl.errors import ConfigError
from tests import golden

ROW = {"prompt": "How much is 2 + 2?", "answer": "4"}


def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


def divide(a: float, b: float) -> float:
    return a / b


def hermes(*calls: ToolCall) -> str:
    return FORMS["hermes"].render(calls)


async def results(environment: ToolEnvironment, *calls: ToolCall) -> list[str]:
    observation = await environment.step(hermes(*calls))
    assert isinstance(observation.text, list)
    return [message["content"] for message in observation.text]


async def test_an_episode() -> None:
    environment = ToolEnvironment([add])
    opening = await environment.reset(ROW, 0)
    assert opening.text == ROW["prompt"]
    assert [tool["function"]["name"] for tool in opening.tools] == ["add"]
    first = await environment.step(f"I add. {hermes(ToolCall('add', {'a': 2, 'b': 2}))}")
    assert first == Observation([{"role": "tool", "name": "add", "content": "4"}], info={"calls": 1, "failed_calls": 0})
    assert await environment.step("It is 4.") == Observation("", done=True, info={"calls": 0, "failed_calls": 0})


@pytest.mark.parametrize("form", FORMS)
async def test_every_form_is_read(form: str) -> None:
    environment = ToolEnvironment([add], form=form)
    observation = await environment.step(FORMS[form].render([ToolCall("add", {"a": 1, "b": 1})]))
    assert observation.text == [{"role": "tool", "name": "add", "content": "2"}]


async def test_what_goes_wrong_is_an_observation() -> None:
    def leave() -> None:
        sys.exit(3)

    environment = ToolEnvironment([add, divide, leave])
    assert await results(
        environment,
        ToolCall("add", {"a": 1, "b": "x"}),
        ToolCall("divide", {"a": 1, "b": 0}),
        ToolCall("ad"),
        ToolCall("leave"),
        ToolCall("add", {"a": 1, "b": 2}),
    ) == [
        "the tool add needs b, an integer; it got 'x'",
        "the tool divide raised ZeroDivisionError: float division by zero",
        "there is no tool ad; did you mean add?",
        "the tool leave raised SystemExit: 3",
        "3",
    ]
    malformed = await environment.step(
        '<tool_call>{"name": "add",</tool_call>' + hermes(ToolCall("add", {"a": 1, "b": 2}))
    )
    assert [each["content"][:25] for each in malformed.text] == ["3", "a call is no valid JSON: "]
    assert malformed.info == {"calls": 2, "failed_calls": 1}
    assert not malformed.done


async def test_an_error_that_cannot_be_printed_is_an_observation() -> None:
    class Silent(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    def fail() -> None:
        raise Silent

    def strange() -> object:
        loop: list[object] = []
        loop.append(loop)
        return loop

    failed, circular = await results(ToolEnvironment([fail, strange]), ToolCall("fail"), ToolCall("strange"))
    golden.says(failed)
    assert failed.endswith("Silent: <exception str() failed>")
    assert circular == "the tool strange raised ValueError: Circular reference detected"


async def test_coroutine_functions_run_side_by_side_and_keep_their_order() -> None:
    second_ran = asyncio.Event()

    async def first() -> str:
        await second_ran.wait()
        return "first"

    async def second() -> str:
        second_ran.set()
        return "second"

    assert await results(ToolEnvironment([first, second]), ToolCall("first"), ToolCall("second")) == ["first", "second"]


async def test_a_call_that_is_late_is_an_observation() -> None:
    async def waits() -> None:
        await asyncio.Event().wait()

    def computes() -> None:
        while True:
            try:
                while True:
                    pass
            except Exception:
                pass

    async def gives_up() -> None:
        raise TimeoutError("no answer")

    environment = ToolEnvironment([waits, computes, gives_up], seconds=0.05)
    assert await results(environment, ToolCall("waits"), ToolCall("computes"), ToolCall("gives_up")) == [
        "the tool waits gave no answer within 0.05 s",
        "the tool computes gave no answer within 0.05 s",
        "the tool gives_up raised TimeoutError: no answer",
    ]


async def test_the_wait_for_a_step_can_be_cancelled() -> None:
    began = asyncio.Event()

    async def waits() -> None:
        began.set()
        await asyncio.Event().wait()

    step = asyncio.create_task(ToolEnvironment([waits]).step(hermes(ToolCall("waits"))))
    await began.wait()
    step.cancel()
    with pytest.raises(asyncio.CancelledError):
        await step


def compute_until(done: list[int]) -> None:
    end = time.monotonic() + 20
    while not done and time.monotonic() < end:
        pass


def test_an_alarm_of_somebody_else_goes_on() -> None:
    rang: list[int] = []
    before = signal.signal(signal.SIGALRM, lambda *_: rang.append(1))
    left = signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(OutOfTime), interrupted_after(0.01):
            compute_until([])
        compute_until(rang)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *left)
    assert rang == [1]


def test_another_thread_is_not_interrupted() -> None:
    ran = []

    def work() -> None:
        with interrupted_after(1e-6):
            ran.append(sum(range(1000)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert ran == [499500]


async def test_results_are_cut_at_the_size_that_is_asked_for() -> None:
    def much(count: int) -> str:
        return "ü" * count

    environment = ToolEnvironment([much], max_bytes=100)
    (text,) = await results(environment, ToolCall("much", {"count": 1_000_000}))
    assert text.endswith("... [cut: the result has 2000000 bytes]")
    assert len(text.encode()) <= 100
    assert await results(environment, ToolCall("much", {"count": 50})) == ["ü" * 50]
    assert len((await results(environment, ToolCall("x" * 500_000)))[0]) <= 100


def test_a_text_is_cut_between_characters() -> None:
    for size in range(1, 60):
        assert len(cut("日本語😀" * 20, size).encode()) <= size
    assert cut("abc", 3) == "abc"
    assert cut("\ud800" * 9, 4).encode() == b"????"


async def test_only_so_many_calls_of_one_answer_are_run() -> None:
    ran = []

    def note(number: int) -> int:
        ran.append(number)
        return number

    environment = ToolEnvironment([note], max_calls=2)
    assert await results(environment, *(ToolCall("note", {"number": number}) for number in range(4))) == [
        "0",
        "1",
        "not run: at most 2 calls of one answer are run",
        "not run: at most 2 calls of one answer are run",
    ]
    assert ran == [0, 1]


async def test_results_as_a_user_message() -> None:
    environment = ToolEnvironment([add], role="user")
    observation = await environment.step(hermes(ToolCall("add", {"a": 1, "b": 1})) + "<tool_call>")
    assert isinstance(observation.text, str)
    assert observation.text.startswith("add: 2\na call is no valid JSON: ")


class Till:
    """Counts what was bought in one episode."""

    def __init__(self) -> None:
        self.sum = 0

    def reset(self, row: dict[str, Any], seed: int) -> None:
        self.sum = row["start"]

    def buy(self, price: int) -> int:
        self.sum += price
        return self.sum

    @staticmethod
    def pay() -> Observation:
        """Ends the purchase."""
        return Observation("paid", reward=2.0, done=True)

    def _secret(self) -> None: ...


async def test_a_class_has_an_object_for_each_episode() -> None:
    environment = ToolEnvironment([Till])
    for _ in range(2):
        opening = await environment.reset({"prompt": "Buy.", "start": 10}, 0)
        assert [tool["function"]["name"] for tool in opening.tools] == ["buy", "pay"]
        assert await results(environment, ToolCall("buy", {"price": 1}), ToolCall("buy", {"price": 2})) == ["11", "13"]
    ending = await environment.step(hermes(ToolCall("buy", {"price": 1}), ToolCall("pay")))
    assert (ending.reward, ending.done) == (2.0, True)
    assert [each["content"] for each in ending.text] == ["14", "paid"]


async def test_functions_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "my_tools.py"
    file.write_text("def double(n: int) -> int:\n    return 2 * n\n\nclass Empty: ...\n")
    environment = ToolEnvironment([f"{file}:double"])
    assert await results(environment, ToolCall("double", {"n": 4})) == ["8"]
    with golden.raises(ConfigError, match=r"mean double\?"):
        ToolEnvironment([f"{file}:duble"])
    with golden.raises(ConfigError):
        await ToolEnvironment([f"{file}:Empty"]).reset(ROW, 0)


async def test_the_config_names_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "tools_of_a_config.py"
    file.write_text("def double(n: int) -> int:\n    return 2 * n\n")
    make = load(EnvironmentSpec("tools", {"functions": [f"{file}:double"], "form": "pythonic"}))
    opening = await make().reset(ROW, 0)
    assert opening.tools[0]["function"]["name"] == "double"
    with golden.raises(ConfigError, match="'functions'"):
        load(EnvironmentSpec("tools"))


def test_wrong_options_are_refused() -> None:
    for functions in ([], "a.py:f", [add, add]):
        with golden.raises(ConfigError):
            ToolEnvironment(functions)
    wrong: list[dict[str, Any]] = [{"form": "qwen"}, {"role": "tol"}, {"max_calls": 0}, {"seconds": -1}]
    for options in wrong:
        with golden.raises(ConfigError):
            ToolEnvironment([add], **options)


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Item:
    name: str
    colours: set[Colour]


def test_results_are_texts() -> None:
    assert as_text("x") == "x"
    assert as_text(None) == "null"
    assert (
        as_text([Item("ü", {Colour.RED}), b"\xff", Path("a")]) == '[{"name": "ü", "colours": ["red"]}, "\ufffd", "a"]'
    )


def test_an_answer_as_a_message_of_chat_templates() -> None:
    found = FORMS["hermes"].parse("Well. " + hermes(ToolCall("add", {"a": 1})))
    message = assistant_message(found)
    assert json.loads(json.dumps(message)) == {
        "role": "assistant",
        "content": "Well.",
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}],
    }
    assert assistant_message(FORMS["hermes"].parse("4")) == {"role": "assistant", "content": "4"}


async def test_a_call_in_thoughts_that_the_prompt_opened_is_not_run() -> None:
    environment = ToolEnvironment([add])
    await environment.reset(ROW, 0)
    call = hermes(ToolCall("add", {"a": 2, "b": 2}))
    assert (await environment.step(f"perhaps {call}", opened=True)).info["calls"] == 0
    assert (await environment.step(f"no</think>{call}", opened=True)).info["calls"] == 1
