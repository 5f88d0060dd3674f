import sqlite3

import pytest

from asyncrl.children.child_messages import TRACEBACK, greeting, trace, where_to_write
from asyncrl.errors import ConfigError


def deep(error: Exception) -> Exception:
    for number in range(200):
        error.add_note(f"note {number} " + "x" * 100)
    return error


def test_the_end_of_a_long_traceback_is_reported() -> None:
    text = trace(deep(ValueError("no")))
    assert len(text) == TRACEBACK
    assert "note 199" in text


def test_the_first_message_of_a_child_is_what_it_loaded_or_the_mistake_of_the_user() -> None:
    def raises(error: Exception) -> dict[str, object]:
        raise error

    assert greeting("reward.functions", lambda: {"concurrent": [True]}) == {"concurrent": [True]}
    assert greeting("reward.functions", lambda: raises(ConfigError("write it so"))) == {"mistake": "write it so"}
    mistake = greeting("reward.functions", lambda: raises(ZeroDivisionError("by nothing")))["mistake"]
    assert mistake.startswith("reward.functions could not be loaded: ZeroDivisionError: by nothing\nTraceback")


def test_a_traceback_begins_with_the_users_first_line() -> None:
    def broken() -> dict[str, object]:
        return {"a": 1 / 0}  # type: ignore[dict-item]

    mistake = greeting("reward.functions", broken)["mistake"]
    first = next(line for line in mistake.splitlines() if line.lstrip().startswith("File "))
    assert first.endswith("in broken")


def wrapped(error: Exception) -> Exception:
    try:
        raise RuntimeError("the cache cannot be opened") from error
    except RuntimeError as outer:
        return outer


@pytest.mark.parametrize(
    ("error", "advised"),
    [
        (OSError(30, "Read-only file system", "/home/me/log.txt"), True),
        (wrapped(OSError(30, "Read-only file system", "/home/me/cache")), True),
        (sqlite3.OperationalError("attempt to write a readonly database"), True),
        (sqlite3.OperationalError("unable to open database file"), True),
        (OSError(28, "No space left on device", "/tmp/log.txt"), False),
        (FileNotFoundError(2, "No such file or directory", "log.txt"), False),
        (ValueError("30"), False),
    ],
)
def test_an_error_of_a_read_only_file_system_names_the_sandbox(error: Exception, advised: bool) -> None:
    assert ("children.writable" in where_to_write(error)) == advised

    def load() -> dict[str, object]:
        raise error

    assert ("children.writable" in greeting("reward.functions", load)["mistake"]) == advised
