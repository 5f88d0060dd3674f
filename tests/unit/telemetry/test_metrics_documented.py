"""docs/metrics.md: all that sources write stands in it, and nothing else, with the names of verl and TRL."""

import ast
import re
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from asyncrl.controller.observers.evaluation import EpisodesEvaluation
from asyncrl.controller.observers.staleness_report import UNTRAINED
from asyncrl.controller.sample_tracker import NO_GREEDY, POISON
from asyncrl.rewards.sample import BAD_ROW
from asyncrl.telemetry.display import SHOWN, SHOWN_OF_ACTING
from asyncrl.telemetry.jsonl import FURTHER_METRICS, METRICS
from asyncrl.telemetry.state_clock import STATES

ROOT = Path(__file__).parents[3]
ALGORITHM, _, AFTER = (ROOT / "docs/metrics.md").read_text().partition("## Evaluations")
EVALUATIONS = AFTER.partition("## Prometheus")[0]
ROWS = [line.removeprefix("- ").partition(": ") for line in ALGORITHM.splitlines() if line.startswith("- `")]
"""Names of metrics, a colon, and what they mean."""
DOCUMENTED = [name for names, _, _ in ROWS for name in re.findall(r"`([^`]+)`", names)]
FOLDERS = ("asyncrl", "protocols", "services", "deploy")
SOURCES = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
FAMILIES = sorted({name.split("/")[0] for name in DOCUMENTED if "/" in name})
ANYTHING = "<>"
THEIRS = r"`[\w/<>@-]+`(?: \([\w ,]+\))?"
"""A name of another trainer, and how its number differs."""


def texts(node: ast.AST) -> Iterator[str]:
    """Strings in the code of a file, what is filled in as <>."""
    match node:
        case ast.Constant(value=str(text)):
            yield text
        case ast.JoinedStr(values=parts):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else ANYTHING for part in parts)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from texts(child)


@pytest.fixture(scope="module")
def written() -> set[str]:
    """All texts in sources that look like a metric's name; of one that begins with what is filled in, the critics'."""
    name = re.compile(rf"({'|'.join(FAMILIES)})/[^\s.]+|<>/[a-z_]+")
    return {text for path in SOURCES for text in texts(ast.parse(path.read_text())) if name.fullmatch(text)}


def as_pattern(name: str) -> str:
    return re.sub(r"<\w*>", "[\\\\w <>]+", re.escape(name).replace(r"\<", "<").replace(r"\>", ">"))


def test_the_page_has_the_names_of_the_lists_and_each_once() -> None:
    assert sorted(DOCUMENTED) == sorted([*METRICS, *FURTHER_METRICS])


def test_everything_that_is_written_is_documented(written: set[str]) -> None:
    assert len(written) > 50
    known = re.compile("|".join(as_pattern(name) for name in DOCUMENTED))
    filled_in = [text for text in written if ANYTHING in text]
    covering = {text: [name for name in DOCUMENTED if re.fullmatch(as_pattern(text), name)] for text in filled_in}
    assert [text for text in written if not known.fullmatch(text) and not covering.get(text)] == []


def test_everything_that_is_documented_is_written(written: set[str]) -> None:
    by_sources = re.compile("|".join(as_pattern(text) for text in written))
    literal = {text for path in SOURCES for text in texts(ast.parse(path.read_text()))}
    missing = [name for name in DOCUMENTED if "/" in name and not by_sources.fullmatch(name.replace("<decile>", "d1"))]
    assert missing == []
    assert [name for name in DOCUMENTED if "/" not in name and name not in literal] == []


@pytest.mark.parametrize("row", ROWS, ids=[names for names, _, _ in ROWS])
def test_every_meaning_is_that_of_the_list_with_the_names_of_verl_and_trl(row: tuple[str, str, str]) -> None:
    names, _, text = row
    theirs = re.search(rf" \((?:verl {THEIRS})?(?:, )?(?:TRL {THEIRS})?\)$", text)
    meaning = text[: theirs.start()] if theirs else text
    assert len(meaning) > 9
    if names.count("`") == 2:
        assert meaning == {**METRICS, **FURTHER_METRICS}[names.strip("`")]


def test_reasons_of_drops_and_states_of_workers_are_documented() -> None:
    calls = [node for path in SOURCES for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    drops = [call for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("drop", "_drop_ready")]
    given = [ast.literal_eval(arg) for call in drops for arg in call.args if isinstance(arg, ast.Constant)]
    reasons = {reason for reason in given if isinstance(reason, str)}
    reasons |= {POISON, NO_GREEDY, BAD_ROW, "unscorable", *UNTRAINED}
    told = ALGORITHM[ALGORITHM.index("Reasons why") :]
    assert {"stale", "unscorable", "no_baseline", "no_signal"} <= reasons
    assert {text for text in re.findall(r"`([\w ]+)`", told)} == reasons
    assert all(f"`{state}`" in ALGORITHM for state in (*STATES, "unaccounted"))


def test_columns_of_evaluations_are_documented() -> None:
    documented = [line.split("`")[1] for line in EVALUATIONS.splitlines() if line.startswith("- `")]
    assert documented == ["incarnation", *(field.name for field in fields(EpisodesEvaluation))]


def test_what_the_line_of_a_step_calls_a_metric_is_said() -> None:
    page = " ".join(ALGORITHM.split())
    for shown in (SHOWN, SHOWN_OF_ACTING):
        assert ", ".join(f"{label}: `{name}`" for name, label, _ in shown) in page
