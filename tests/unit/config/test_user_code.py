"""What the user names is found, or the message says what is there."""

from pathlib import Path

import pytest

from asyncrl.config.user_code import resolve, suggestion
from asyncrl.errors import ConfigError


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "mine.py"
    path.write_text("def right(sample):\n    return 1.0\n")
    return path


def test_a_file_is_loaded_once(file: Path) -> None:
    assert resolve(f"{file}:right", "here")(None) == 1.0
    assert resolve(f"{file}:right", "here") is resolve(f"{file}:right", "here")


def test_a_file_that_failed_to_load_is_tried_again(file: Path) -> None:
    file.write_text("raise KeyError('the user')\n")
    with pytest.raises(KeyError, match="the user"):
        resolve(f"{file}:right", "here")
    file.write_text("right = 2\n# another size, so that no stale bytecode is taken\n")
    assert resolve(f"{file}:right", "here") == 2


@pytest.mark.parametrize(
    ("spec", "told"),
    [
        ("right", "FILE.py:NAME"),
        ("{folder}/mien.py:right", "did you mean mine.py"),
        ("{folder}/mine.py:rihgt", "did you mean right"),
        ("no_such_module:right", "no module no_such_module"),
    ],
)
def test_mistakes_are_told_with_the_place_and_the_closest_name(file: Path, spec: str, told: str) -> None:
    with pytest.raises(ConfigError, match=f"^task.prompts: .*{told}"):
        resolve(spec.format(folder=file.parent), "task.prompts")


def test_only_what_a_file_defines_is_offered(file: Path) -> None:
    file.write_text(
        "import json\nfrom pathlib import Path\nfrom asyncrl import train\nfrom os import getcwd\n"
        "from functools import partial\nclass Mine: pass\ndef right(sample):\n    return 1.0\n"
        "half = partial(right)\nTABLE = {}\n_hidden = 1\n"
    )
    with pytest.raises(ConfigError, match=r"has no nosuch; there are Mine, right, half, TABLE$"):
        resolve(f"{file}:nosuch", "here")
    passing = file.with_name("passing_on.py")
    passing.write_text("from asyncrl import train\n")
    with pytest.raises(ConfigError, match=r"has no nosuch; there are train$"):
        resolve("passing_on:nosuch", "here")


def test_of_many_names_the_first_are_told_and_how_many_more_there_are() -> None:
    assert suggestion("zz", [f"name{number}" for number in range(13)]).endswith(", name11 and 1 more")
    assert suggestion("zz", [f"name{number}" for number in range(12)]).endswith(", name10, name11")
    assert suggestion("nmae3", [f"name{number}" for number in range(13)]) == "; did you mean name3?"
