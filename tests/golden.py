"""Golden messages: what the tests of test_NAME.py say stands in test_NAME.messages.txt beside it, by test and in order.

    with golden.raises(TaskError, match="line 2"):     # the fact that the test is about; its sentence is in the file
        read(path)
    golden.says(capsys.readouterr().err, "task.prompts")

`pytest --update-messages PATH` writes the files anew. A message that holds something of the machine (its kernel, memory
or versions, another package's wording) has no place there: such a test matches a short part of it.
"""

import os
import re
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest
from pydantic import ValidationError

E = TypeVar("E", bound=BaseException)
CHECKOUT = Path(__file__).parents[1]
UPDATE = "run pytest --update-messages with this file, and read the difference"
CHANGING = (
    (re.escape(tempfile.gettempdir()) + r"/tmp[a-z0-9_]{8}(?![\w-])", "<tmp_path>"),
    (
        rf"(?:{re.escape(sys.prefix)}|{re.escape(os.path.relpath(sys.prefix, CHECKOUT))})/bin/(asyncrl|python)[\d.]*",
        r"\1",
    ),
    (re.escape(str(CHECKOUT)) + r"(?![\w-])", "<checkout>"),
    (r"(<checkout>/[\w./-]+\.py), line \d+", r"\1, line <number>"),
    (r"(127\.0\.0\.1|0\.0\.0\.0|localhost|\[::1?\]):\d{4,5}\b", r"\1:<port>"),
    (r"\b(pid|process) \d+\b", r"\1 <pid>"),
    (r"\b0x[0-9a-f]{6,}\b", "<address>"),
    (r"\b(?=[a-f]*\d)(?=\d*[a-f])[0-9a-f]{8,64}\b", "<hex>"),
    (r"\b\d+\.\d+ (s|seconds)\b", r"<measured> \1"),
    (r"[ \t]+$", ""),
)
"""(pattern, what stands for it): what changes from run to run or from machine to machine. Folders that pytest made for
a test are <tmp_path>, too, and characters that cannot be printed are written as escapes."""


class Running(NamedTuple):
    """The test that runs. recorded: its messages in the file, None where they are written anew; shown: those so far.
    The hook around each test makes it; says() compares the next message with that of the same place."""

    path: Path
    recorded: list[str] | None
    shown: list[str]
    folder: Path
    """In which pytest makes each tmp_path."""


_running: Running | None = None
SHOWN = pytest.StashKey[dict[Path, dict[str, list[str]]]]()
IN_ORDER = pytest.StashKey[dict[Path, list[str]]]()
"""The tests of each file as they stand in it, where whole files were collected."""


def says(text: object, *facts: str) -> None:
    """Compares a message whole with the recorded one, and looks for facts in it."""
    assert _running is not None, "golden messages are those of a running test"
    for fact in facts:
        assert fact in str(text)
    message = normalised(_wording(text), _running.folder)
    _running.shown.append(message)
    if (recorded := _running.recorded) is not None:
        count = len(_running.shown)
        assert count <= len(recorded), f"{_running.path.name} has no such message; {UPDATE}: {message}"
        assert message == recorded[count - 1], f"another message in {_running.path.name}; {UPDATE}"


@contextmanager
def raises(expected: type[E] | tuple[type[E], ...], match: str = "") -> Iterator[pytest.ExceptionInfo[E]]:
    """pytest.raises, whose error's message is compared whole with the recorded one."""
    with pytest.raises(expected, match=match or None) as caught:
        yield caught
    says(caught.value)


def _wording(text: object) -> str:
    """Returns the text of an error. Of pydantic's it keeps our sentences, and the type alone of its own."""
    if not isinstance(text, ValidationError):
        return str(text)
    found = [
        (".".join(map(str, each["loc"])), each.get("ctx", {}).get("error", each["type"])) for each in text.errors()
    ]
    return "\n".join(f"{place}: {said}" for place, said in found)


def normalised(text: str, folder: Path) -> str:
    """Returns the text with names for what changes. folder: in which pytest makes each tmp_path."""
    text = re.sub(re.escape(str(folder)) + r"/[\w-]+", "<tmp_path>", text)
    for pattern, name in CHANGING:
        text = re.sub(pattern, name, text, flags=re.MULTILINE)
    shown = (each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode() for each in text)
    return "".join(shown).strip("\n")


def cases(file: str, test: str) -> list[str]:
    """Returns what stands in brackets behind a test in its file of messages, where such a test has its cases: a new one
    is a new line `test[CASE]`, whose messages an update writes."""
    lines = Path(file).with_suffix(".messages.txt").read_text().splitlines()
    written = (line[len(test) + 1 : -1] for line in lines if line.startswith(f"{test}["))
    found = [each.encode().decode("unicode_escape") for each in written]  # As pytest writes them.
    assert found, f"{file} has no cases of {test}"
    return found


@lru_cache
def read(path: Path) -> dict[str, list[str]]:
    """{test: its messages}: a test stands at the margin, a message behind "  - ", its further lines below it."""
    found: dict[str, list[str]] = defaultdict(list)
    test = ""
    for line in path.read_text().split("\n") if path.exists() else []:
        if line.startswith("  -"):
            found[test].append(line[4:])
        elif line[:4].strip():
            test = line
        elif found[test]:
            found[test][-1] += f"\n{line[4:]}"
    return {test: [each.strip("\n") for each in messages] for test, messages in found.items() if messages}


def write(path: Path, messages: dict[str, list[str]]) -> None:
    blocks = [
        "\n".join([test, *("  - " + each.replace("\n", "\n    ") for each in messages[test])]) for test in messages
    ]
    text = re.sub(r" +$", "", "\n\n".join(blocks), flags=re.MULTILINE)
    path.write_text(f"{text}\n") if blocks else path.unlink(missing_ok=True)


def _entry(item: pytest.Item) -> tuple[Path, str]:
    return item.path.with_suffix(".messages.txt"), item.nodeid.partition("::")[2]


def _place(item: pytest.Item) -> tuple[int, ...]:
    """Line, and number of each parameter."""
    case = getattr(item, "callspec", None)
    return (item.location[1] or 0, *(case.indices.values() if case else ()))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-messages", action="store_true", help="write the golden messages of these tests anew")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[SHOWN] = defaultdict(dict)
    config.stash[IN_ORDER] = defaultdict(list)
    if config.option.update_messages and getattr(config.option, "numprocesses", None):
        raise pytest.UsageError("--update-messages writes from one process: leave out -n")


@pytest.hookimpl(tryfirst=True)  # Before -k and -m leave tests out: their messages are not stale.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not any("::" in each for each in config.args) and not getattr(config.option, "lf", False):
        for path, test in map(_entry, sorted(items, key=_place)):
            config.stash[IN_ORDER][path].append(test)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    global _running
    path, test = _entry(item)
    updates = item.config.option.update_messages
    recorded = read(path)
    stale = recorded.keys() - {*item.config.stash[IN_ORDER].get(path, recorded)}
    assert updates or not stale, f"{path.name} has messages of tests that are gone; {UPDATE}: {sorted(stale)}"
    folder = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
    running = _running = Running(path, None if updates else recorded.get(test, []), [], folder)
    try:
        yield
    finally:
        _running = None
    left = (running.recorded or [])[len(running.shown) :]
    assert not left, f"{path.name} has messages that the test no longer shows; {UPDATE}: {left}"
    item.config.stash[SHOWN][path][test] = running.shown


def pytest_sessionfinish(session: pytest.Session) -> None:
    if session.config.option.update_messages:
        for path, shown in session.config.stash[SHOWN].items():
            messages = read(path) | shown
            tests = session.config.stash[IN_ORDER].get(path, messages)
            write(path, {test: messages[test] for test in tests if messages.get(test)})
