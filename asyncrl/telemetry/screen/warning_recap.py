"""Keeps the warnings of a run in `warnings.jsonl`, and repeats each kind in one line when the run has ended."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from asyncrl.telemetry.jsonl import LineFile, Object, read_lines

LONGEST = 400
"""Characters of a repeated warning."""


@dataclass(frozen=True, slots=True)
class WarningFile:
    """Shows warnings and keeps them. say: shows one. step: returns the last step that has ended."""

    path: Path
    say: Callable[[str], None]
    step: Callable[[], int]

    def warn(self, text: str) -> None:
        """Shows a warning and writes it down. Raises OSError when the disk takes no more."""
        self.say(text)
        with closing(LineFile(self.path)) as file:
            file.append({"step": self.step(), "kind": _kind(text), "text": text})


def repeated(path: Path) -> Iterator[str]:
    """Yields a line for each kind of warning that the run gave: how often, after which step, and the newest text."""
    kinds: dict[str, list[Object]] = {}
    for line in read_lines(path):
        kinds.setdefault(line["kind"], []).append(line)
    for kind, lines in kinds.items():
        text = _short(lines[-1]["text"]).removeprefix(f"{kind}: ")
        first = lines[0]["step"]
        last = lines[-1]["step"]
        often = f"once, after step {first}" if len(lines) == 1 else f"{len(lines)} times, after steps {first} to {last}"
        yield f"{kind} ({often}): {text[:LONGEST]}"


def _short(text: str) -> str:
    """Returns the first line of a warning, with the next one where the first announces it, which is then the cause."""
    first, _, rest = text.partition("\n")
    cause = rest.strip().partition("\n")[0]
    return f"{first} {cause}".rstrip() if first.endswith(":") else first


def _kind(text: str) -> str:
    """Returns the key of the guard that a warning is from, or where another is about a step, "mismatch"."""
    begin = text.partition(":")[0]
    return begin if begin.startswith("guards.") else "mismatch" if begin.startswith("step ") else "warning"
