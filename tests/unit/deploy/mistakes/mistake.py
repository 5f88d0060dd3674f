"""One mistake of a new user: what is typed in which folder, and what has to be answered."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

BASE = """\
[model]
name = "model"
[task]
prompts = "rows.jsonl"
[reward]
functions = ["exact_match"]
"""
"""The experiment of a new user, which would run."""
REWARD = "def reward(sample):\n    return 1.0\n"
ROWS = "".join(json.dumps({"prompt": prompt, "answer": "a"}) + "\n" for prompt in ("ab", "cd"))
LONGEST_LINE = 480


@dataclass(frozen=True, slots=True)
class Mistake:
    """name: of the test. typed: behind `asyncrl`. says: what the answer must have, a text or several. toml: text of
    mine.toml. files: further files, by name; a text of None removes the file. environ: variables. lines: most lines of
    the answer. code: exit status."""

    name: str
    typed: str
    says: str | tuple[str, ...]
    toml: str = BASE
    files: Mapping[str, str | bytes | None] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    lines: int = 1
    code: int = 2


Answered = Callable[[Mistake], str]


def each(*mistakes: Mistake) -> pytest.MarkDecorator:
    """Parametrises a test by mistakes."""
    return pytest.mark.parametrize("mistake", [pytest.param(one, id=one.name) for one in mistakes])


def beside(text: str) -> str:
    """Returns the experiment with further lines."""
    return BASE + text


def scored_by(functions: str) -> str:
    """Returns the experiment with other reward functions."""
    return BASE.replace('["exact_match"]', functions)


def write(folder: Path, mistake: Mistake) -> None:
    """Writes the folder of a new user, with the mistake."""
    files = {"mine.toml": mistake.toml, "rows.jsonl": ROWS, "mine.py": REWARD, **mistake.files}
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            path.unlink()
        elif isinstance(text, bytes):
            path.write_bytes(text)
        else:
            path.write_text(text)


def check(mistake: Mistake, code: int, printed: str) -> None:
    """Holds that an answer is right, short and without a traceback."""
    lines = printed.splitlines()
    expected = [mistake.says] if isinstance(mistake.says, str) else mistake.says
    assert (code, [text for text in expected if text not in printed]) == (mistake.code, []), printed
    assert "Traceback" not in printed
    assert 1 <= len(lines) <= mistake.lines, printed
    assert max(map(len, lines)) <= LONGEST_LINE, printed
