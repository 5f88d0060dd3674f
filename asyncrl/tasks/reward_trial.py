"""Tries the rewards of a run on answers that are known to be wrong or right, so that none that cannot tell them apart
trains.

A template is at fault for certain where a program that does nothing passes the tests of a row, or where on no tried row
the right answer has more than a wrong one. What is right for functions of the user nobody knows: one that gives all
tried answers the same is said, and refused only where no other function of the run tells them apart.
"""

import ast
import asyncio
import json
import random
import re
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.children.containment import Containment, containment_of
from asyncrl.config.schema import Config, RewardConfig, Scorer
from asyncrl.errors import AsyncrlError, DeadlineExceeded, RewardError, TaskError
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.execution.split_pool import SplitPool
from asyncrl.rewards.functions import FunctionSpec, function_specs, held_out_specs, load
from asyncrl.rewards.sample import FunctionResult, Sample
from asyncrl.rewards.templates import JUDGE_TEMPLATE, exact_match, math_verify, numeric, reasoning_gym
from asyncrl.tasks.prompt_rows import PromptRows, Row

FIRST, DRAWN = 3, 5
"""Rows that are tried: the first ones, and some that the seed draws."""
LONGEST = 60.0
"""Seconds that the trial of a section may take."""
PASSES = "passes_tests"
IN_CHILDREN = (PASSES, math_verify.__name__, reasoning_gym.__name__)
"""Templates that may hang or need a sandbox; the other two of TRIED are called here."""
TRIED = (*IN_CHILDREN, exact_match.__name__, numeric.__name__)
"""Templates that compare an answer with the row."""
SOLUTIONS = ("solution", "canonical_solution", "reference_solution", "code", "completion")
"""Columns in which data sets of programs have a right one."""
WANTED = ("answer", "solution", "ground_truth", "final_answer", "gold")
"""Columns in which data sets have the right answer; a `target` or `label` may be another thing."""
NOTHING, EMPTY, NONSENSE = "a program that does nothing", "an empty answer", "nonsense"
WORDS = "Colourless green ideas sleep furiously, and so does Bob."
SHAPES = (
    *("{0}", "\\boxed{{{0}}}", "#### {0}", "The answer is {0}.", "The answer is: {0}", "Answer: {0}", "ANSWER: {0}"),
    *("**{0}**", "[[{0}]]", "({0})", "Final answer: {0}", "```python\n{0}\n```", "<think>\nI think.\n</think>\n{0}"),
    *("<answer>{0}</answer>", "<answer>\n{0}\n</answer>", "<think>I think.</think><answer>{0}</answer>"),
    *("<think>I think.</think>\n<answer>{0}</answer>", "<think>\nI think.\n</think>\n<answer>\n{0}\n</answer>"),
    *("<think>\nI think.\n</think>\n\n<answer>\n{0}\n</answer>", "I think.\n</think>\n{0}"),
    *("I think.</think>\n<answer>{0}</answer>", "I think.\n</think>\n<answer>\n{0}\n</answer>"),
    "<reasoning>\nI think.\n</reasoning>\n<answer>\n{0}\n</answer>\n",
    "<start_working_out>I think.<end_working_out><SOLUTION>{0}</SOLUTION>",
)
"""Forms in which functions of users usually want the right answer."""


class TriedRow(NamedTuple):
    """A row by its place in words."""

    where: str
    row: Row


@dataclass(frozen=True, slots=True)
class Outcome:
    """Holds what a function, or several together, gave on one row. wrong, right: kind of text, text, score."""

    where: str
    wrong: Sequence[tuple[str, str, float]]
    right: Sequence[tuple[str, str, float]]

    @property
    def is_constant(self) -> bool:
        return len({round(score, 9) for _, _, score in (*self.wrong, *self.right)}) == 1

    @property
    def as_words(self) -> str:
        """Returns a wrong and a right answer in words; two wrong ones where the row has no right one."""
        shown = (self.wrong[0], self.right[0] if self.right else self.wrong[-1])
        return " and ".join(f"{name} ({text[:60]!r})" for name, text, _ in shown)


async def try_rewards(config: Config, sets: Mapping[str, PromptRows]) -> list[str]:
    """Tries rewards and costs on a few rows of each source, by its config key, as contained as in a run. Returns a line
    for each that may not be meant. Raises TaskError, which names function, row and both answers, for rewards that
    cannot tell right from wrong."""
    problems, notes = list[str](), list[str]()
    for key, prompts in sets.items():
        for service, specs in _functions_of(config, key):
            if is_training := key == "task.prompts":
                judges = [spec for spec in specs if spec.use == JUDGE_TEMPLATE]
                notes += [f"{spec.key}: {spec.use} was not tried on answers of rows: its calls cost" for spec in judges]
            rows = _rows_of(prompts, config.seed)
            try:
                async with asyncio.timeout(LONGEST):
                    said = await _tried(config, service, specs, rows, is_training=is_training)
            except (TimeoutError, DeadlineExceeded):  # Also while a child loads its functions.
                said = [(False, f"{service}.functions: trying them on answers of rows took over {LONGEST:g} s")]
            problems += [text for is_wrong, text in said if is_wrong]
            notes += [text for is_wrong, text in said if not is_wrong]
    if problems:
        raise TaskError("\n".join(problems))
    return notes


def _functions_of(config: Config, key: str) -> Iterator[tuple[Scorer, list[FunctionSpec]]]:
    """Yields the functions that score answers to prompts of a source, and run on this machine."""
    own = {
        f"{config.evaluate.set_named(name).section}.prompts": specs for name, specs in held_out_specs(config).items()
    }
    for service, section in config.scorers.items():
        if service not in config.fleet.joined and section.functions and not config.acting.env:
            specs = own[key] if key in own and service == "reward" else function_specs(config, service)
            if key == "task.prompts" or any(spec.use == PASSES for spec in specs):
                yield service, specs


def _rows_of(prompts: PromptRows, seed: int) -> list[TriedRow]:
    rest = range(FIRST, len(prompts))
    places = [*range(min(FIRST, len(prompts))), *random.Random(seed).sample(rest, min(DRAWN, len(rest)))]
    return [TriedRow(prompts.where(place), prompts.row(place)) for place in places]


async def _tried(
    config: Config, service: Scorer, specs: Sequence[FunctionSpec], rows: Sequence[TriedRow], *, is_training: bool
) -> list[tuple[bool, str]]:
    """Returns what is to be said of the functions of one section, and whether it is wrong for certain."""
    said = list[tuple[bool, str] | None]()
    for spec in specs:
        if spec.use in TRIED and spec.use not in IN_CHILDREN:
            outcomes = [outcome for tried in rows if (outcome := _scored_here(spec, tried, config.steps))]
            said.append(_of_template(spec, outcomes))
    templates = [spec for spec in specs if spec.use in IN_CHILDREN]
    asks_users = is_training and service == "reward" and not config.environment.use
    users = [spec for spec in specs if spec.is_users and asks_users and not spec.by_token]
    async with AsyncExitStack() as stack:
        pool = await _started(config, config.scorers[service], [*templates, *users], stack)
        if pool is not None:
            for number, spec in enumerate(templates):
                outcomes = [outcome for tried in rows if (outcome := await _of_row(pool, number, spec, tried))]
                said.append(_of_template(spec, outcomes))
            is_whole = len(users) == len([spec for spec in specs if spec.name != "overlong"])
            is_whole = is_whole and not config.reward.model and not config.feedback.asks
            said += await _of_users(pool, len(templates), users, rows, config, is_whole=is_whole)
    return [each for each in said if each]


async def _started(
    config: Config, section: RewardConfig, specs: Sequence[FunctionSpec], stack: AsyncExitStack
) -> SplitPool | None:
    """Starts the functions until the stack ends; None where they cannot start, which the run itself says better."""
    if not specs:
        return None
    kept = containment_of(config, [spec.use for spec in specs if spec.is_users], ())
    scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="asyncrl-trial-"))
    tasks = await stack.enter_async_context(asyncio.TaskGroup())

    def made(specs: Sequence[FunctionSpec], containment: Containment | None) -> ChildPool:
        return ChildPool(
            specs,
            tasks,
            workers=1,
            deadline=section.deadline,
            start_deadline=config.fleet.start_deadline,
            printed=Path(scratch) / "printed",
            first_failure_only=True,
            containment=containment,
            variables=config.children.variables,
        )

    pool = SplitPool(specs, kept, made)
    try:
        await pool.start()
    except AsyncrlError:
        return None
    stack.push_async_callback(pool.stop)
    return pool


def _scored_here(spec: FunctionSpec, tried: TriedRow, steps: int) -> Outcome | None:
    """Returns what a template gives that only compares texts; None for a row that it cannot score."""
    function, (wrong, right) = load(spec), _known_answers(spec, tried.row)
    try:
        scores = [float(function(each)) for each in _samples(tried.row, [*wrong.values(), *right.values()], steps)]
    except RewardError:
        return None
    return _outcome(tried.where, wrong, right, scores)


async def _of_row(pool: SplitPool, number: int, spec: FunctionSpec, tried: TriedRow) -> Outcome | None:
    wrong, right = _known_answers(spec, tried.row)
    scores = await _scores(pool, number, _samples(tried.row, [*wrong.values(), *right.values()]))
    return None if scores is None else _outcome(tried.where, wrong, right, scores)


async def _scores(pool: SplitPool, number: int, samples: Sequence[Sample]) -> list[float] | None:
    """Returns the scores of one function; None where it failed on one, or left it out."""
    results: list[FunctionResult] = await pool.run(number, samples)
    if any(result.reason or result.value is None for result in results):
        return None
    return [_number(result.value) for result in results]


def _number(value: Any) -> float:
    return float(sum(value.values()) if isinstance(value, dict) else value)


def _outcome(where: str, wrong: Mapping[str, str], right: Mapping[str, str], scores: Sequence[float]) -> Outcome:
    named = [(name, text, score) for (name, text), score in zip([*wrong.items(), *right.items()], scores, strict=True)]
    return Outcome(where, named[: len(wrong)], named[len(wrong) :])


def _samples(row: Row, texts: Sequence[str], steps: int = 0) -> list[Sample]:
    """Returns samples of these texts, of which each word is a token."""
    made = []
    for member, text in enumerate(texts):
        ids = list(range(len(text.split())))
        made.append(
            Sample(row.prompt, text, dict(row.columns), 0, member, "stop", len(ids), token_ids=ids, steps=steps)
        )
    return made


def _known_answers(spec: FunctionSpec, row: Row) -> tuple[dict[str, str], dict[str, str]]:
    """Returns answers that a template must fail, and the one of the row that it must not, if there is one."""
    if spec.use == PASSES:
        programs = {f"the row's {name}": _program(row, name) for name in SOLUTIONS if name in row.columns}
        found = [(name, text) for name, text in programs.items() if text]
        return {NOTHING: "pass\n"}, dict(found[:1])
    wrong = {EMPTY: "", NONSENSE: WORDS}
    column = str(spec.options.get("column", "answer"))
    if spec.use == reasoning_gym.__name__ or row.columns.get(column) is None:
        return wrong, {}
    text = str(row.columns[column])
    last = text.rpartition("####")[2].strip()
    is_bare = spec.use == math_verify.__name__ and "$" not in last and "boxed" not in last
    return wrong, {f"the row's {column}": f"\\boxed{{{last}}}" if is_bare else text}


def _program(row: Row, column: str) -> str:
    """Returns the program of a column, which may be the body of a function that the prompt begins; "" for none."""
    text = row.columns[column]
    if not isinstance(text, str) or not text.strip():
        return ""
    begun = isinstance(row.prompt, str) and text[:1] in (" ", "\t") and not row.columns.get("before")
    text = f"{row.prompt}{text}" if begun else text
    fenced = re.search(r"```(?:python|py)?\n(.*?)```", text, re.DOTALL)
    try:
        ast.parse(f"{row.columns.get('before') or ''}{fenced[1] if fenced else text}")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""  # Another language, or words about it.
    return text


def _of_template(spec: FunctionSpec, outcomes: Sequence[Outcome]) -> tuple[bool, str] | None:
    """Returns whether what a template gave is wrong for certain, and what it gave; None where nothing is to be said."""
    for outcome in outcomes:
        for name, text, score in outcome.wrong:
            if score >= 1.0:
                said = f"{name} ({text!r}) has {score:g}, like a right answer: correct the row, or leave it out"
                return True, f"{spec.key}: {spec.use} on {outcome.where}: {said}"
    known = [outcome for outcome in outcomes if outcome.right]
    alike = [each for each in known if each.right[0][2] <= max(score for _, _, score in each.wrong)]
    if alike and len(alike) == len(known):
        said = f"{alike[0].as_words} both have {alike[0].right[0][2]:g}, and on each row that was tried it is so"
        advice = f"no answer would be right: look at the rows and at the options of {spec.use}"
        return True, f"{spec.key}: {spec.use} on {alike[0].where}: {said}; {advice}"
    if missed := [outcome for outcome in known if outcome.right[0][2] < 1.0]:
        said = (
            f"{missed[0].right[0][0]} has {missed[0].right[0][2]:g} and not 1, so on {len(missed)} of {len(known)} rows"
        )
        return False, f"{spec.key}: {spec.use} on {missed[0].where}: {said} that were tried: is it right?"
    return None


async def _of_users(
    pool: SplitPool,
    begin: int,
    specs: Sequence[FunctionSpec],
    rows: Sequence[TriedRow],
    config: Config,
    *,
    is_whole: bool,
) -> list[tuple[bool, str] | None]:
    """Tries functions of the user until each has told two answers to one row apart. begin: number of the first one in
    the pool. is_whole: whether their sum is the whole reward. A function that fails is left to the run."""
    alike: dict[int, Outcome] = {}
    totals = list[Outcome]()
    asked = set(range(len(specs)))
    for place, (where, row) in enumerate(rows):
        wrong, right = _free_answers(row)
        samples = _samples(row, [*wrong.values(), *right.values()], config.steps)
        total = [0.0] * len(samples)
        for number in sorted(asked if not is_whole else range(len(specs))):
            scores = await _scores(pool, begin + number, samples)
            outcome = None if scores is None else _outcome(where, wrong, right, scores)
            if scores is None or outcome is None or not outcome.is_constant:
                asked.discard(number)
                alike.pop(number, None)
            elif number in asked and (place == 0 or number in alike):
                alike.setdefault(number, outcome)
            is_whole = is_whole and scores is not None
            total = [one + specs[number].weight * other for one, other in zip(total, scores or total, strict=True)]
        summed = _outcome(where, wrong, right, total)
        is_whole = is_whole and summed.is_constant and bool(right)
        totals.append(summed)
        if not asked and not is_whole:
            break
    if is_whole and totals and specs:
        return [_of_total(specs, totals, config)]
    return [
        (
            False,
            f"{specs[number].key}: {specs[number].use} on {each.where}: {each.as_words} both have "
            f"{each.wrong[0][2]:g}, and so has each answer that was tried: is that meant?",
        )
        for number, each in alike.items()
    ]


def _of_total(specs: Sequence[FunctionSpec], totals: Sequence[Outcome], config: Config) -> tuple[bool, str]:
    """Returns what is said of functions that together tell no answers apart: it is an error, unless the user has said
    that equal rewards are meant."""
    first = totals[0]
    tried = len(first.wrong) + len(first.right)
    said = f"{first.as_words} both have {first.wrong[0][2]:g}, and so has each of {tried} answers"
    advice = (
        'mend the function; where it wants a form of its own, guards.no_variance = "off" starts the run all the same'
    )
    names = ", ".join(spec.use for spec in specs)
    text = f"{specs[0].key}: {names} on {first.where}: {said}, on {len(totals)} rows: nothing can be learnt; {advice}"
    return config.guards.no_variance != "off", text


def _free_answers(row: Row) -> tuple[dict[str, str], dict[str, str]]:
    """Returns wrong answers of several kinds, and the right one in the usual forms and in the marks that the prompt
    names, where the row has one."""
    wrong = {EMPTY: "", NONSENSE: WORDS, "a long text": " ".join([WORDS] * 30), "a program": "```python\npass\n```"}
    wanted = {name: row.columns.get(name) for name in WANTED}
    model = row.columns.get("reward_model")
    wanted["reward_model"] = model.get("ground_truth") if isinstance(model, Mapping) else None
    marks = list(dict.fromkeys(re.findall(r"<([A-Za-z_]\w*)>", str(row.prompt))))
    asked = "\n".join(f"<{mark}>\n{'{0}' if mark is marks[-1] else 'I think.'}\n</{mark}>" for mark in marks)
    right = dict[str, str]()
    for name, value in wanted.items():
        value = value[0] if isinstance(value, list | tuple) and value else value
        if not isinstance(value, str | int | float) or not str(value).strip():
            continue
        last = str(value).rpartition("####")[2].strip()
        named = [asked, asked.partition(">")[2]] if asked else []  # A prompt may have opened the first one.
        forms = [shape.format(last) for shape in (*SHAPES, *named)]
        texts = dict.fromkeys([last, str(value), *forms, json.dumps({"answer": last})])
        right |= {f"the row's {name}" + (f" in form {n}" if n else ""): text for n, text in enumerate(texts)}
    return wrong, right
