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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from asyncrl.children.containment import Containment, containment_of
from asyncrl.config.schema import Config, RewardConfig, Scorer
from asyncrl.environments.transcript import POLICY
from asyncrl.errors import AsyncrlError, DeadlineExceeded, RewardError, TaskError
from asyncrl.rewards.execution.child_pool import ChildPool, SplitPool
from asyncrl.rewards.execution.function_call import ProcessCopies
from asyncrl.rewards.execution.thread_pool import named
from asyncrl.rewards.functions import FunctionSpec, function_specs, held_out_specs, load
from asyncrl.rewards.sample import Function, FunctionResult, Sample
from asyncrl.rewards.templates import ENVIRONMENT, JUDGE_TEMPLATE, exact_match, math_verify, numeric, reasoning_gym
from asyncrl.tasks.prompt_rows import PromptRows, Row

FIRST = 3
DRAWN = 5
"""Rows that are tried: the first ones, and some that the seed draws."""
LONGEST = 60.0
"""Seconds that the trial of a section may take."""
PASSES = "passes_tests"
IN_CHILDREN = (PASSES, math_verify.__name__, reasoning_gym.__name__)
"""Templates that may hang or need a sandbox; the other two of TRIED are called here."""
TRAINING = "task.prompts"
NOT_TRIED = {
    JUDGE_TEMPLATE: "its calls cost",
    ENVIRONMENT: "its rewards come of playing, which `asyncrl try` shows",
}
"""Templates that are not tried, and why."""
TRIED = (*IN_CHILDREN, exact_match.__name__, numeric.__name__)
"""Templates that compare an answer with the row."""
SOLUTIONS = ("solution", "canonical_solution", "reference_solution", "code", "completion")
"""Columns in which data sets of programs have a right one."""
WANTED = ("answer", "solution", "ground_truth", "final_answer", "gold")
"""Columns in which data sets have the right answer; a `target` or `label` may be another thing."""
NOTHING = "a program that does nothing"
EMPTY = "an empty answer"
NONSENSE = "nonsense"
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


Pool = SplitPool | ProcessCopies


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


async def try_rewards(config: Config, sets: Mapping[str, PromptRows], here: Sequence[Function] = ()) -> list[str]:
    """Tries rewards and costs on a few rows of each source, by its config key, as contained as in a run. here: rewards
    that only this process has. Returns a line for each that may not be meant, or cannot be tried. Raises TaskError,
    which names function, row and both answers, for rewards that cannot tell right from wrong."""
    problems = list[str]()
    notes = list[str]()
    for key, prompts in sets.items():
        for service, specs in _functions_of(config, key, here):
            untried = {spec.use: f"{spec.key}: {spec.use}" for spec in specs if spec.use in NOT_TRIED}
            notes += [f"{text} was not tried on answers of rows: {NOT_TRIED[use]}" for use, text in untried.items()]
            if service in config.fleet.joined:
                notes.append(f"{service}.functions were not tried on answers of rows: they are on hosts that join")
                continue
            rows = _rows_of(prompts, config.seed)
            try:
                async with asyncio.timeout(LONGEST):
                    said = await _tried(config, service, specs, rows, here, is_training=key == TRAINING)
            except (TimeoutError, DeadlineExceeded):  # Also while a child loads its functions.
                said = [(False, f"{service}.functions: trying them on answers of rows took over {LONGEST:g} s")]
            problems += [text for is_wrong, text in said if is_wrong]
            notes += [text for is_wrong, text in said if not is_wrong]
    if problems:
        raise TaskError("\n".join(problems))
    return notes


def _functions_of(
    config: Config, key: str, here: Sequence[Function]
) -> Iterator[tuple[Scorer, Sequence[FunctionSpec]]]:
    """Yields the functions that score answers to prompts of a source. Those of the user are tried on prompts of the
    run, or of the held-out set that has them."""
    own = {
        f"{config.evaluate.set_named(name).section}.prompts": specs for name, specs in held_out_specs(config).items()
    }
    if here and key == TRAINING:
        yield "reward", [FunctionSpec(name, name) for name, _ in named(here)]
    for service, section in config.scorers.items():
        plays = service == "reward" and config.environment.use and not (section.model or here)
        if (section.functions or plays) and not config.acting.env:
            specs = own[key] if key in own and service == "reward" else function_specs(config, service)
            if key != TRAINING and specs is not own.get(key):
                specs = [spec for spec in specs if spec.use in TRIED]
            if specs:
                yield service, specs


def _rows_of(prompts: PromptRows, seed: int) -> list[TriedRow]:
    rest = range(FIRST, len(prompts))
    places = [*range(min(FIRST, len(prompts))), *random.Random(seed).sample(rest, min(DRAWN, len(rest)))]
    return [TriedRow(prompts.where(place), prompts.row(place)) for place in places]


async def _tried(
    config: Config,
    service: Scorer,
    specs: Sequence[FunctionSpec],
    rows: Sequence[TriedRow],
    here: Sequence[Function],
    *,
    is_training: bool,
) -> list[tuple[bool, str]]:
    """Returns what is to be said of the functions of one section, and whether it is wrong for certain."""
    said = list[tuple[bool, str] | None]()
    for spec in specs:
        if spec.use in TRIED and spec.use not in IN_CHILDREN:
            outcomes = [outcome for tried in rows if (outcome := _scored_here(spec, tried, config.steps))]
            said.append(_of_template(spec, outcomes))
    templates = [spec for spec in specs if spec.use in IN_CHILDREN]
    is_here = bool(here) and is_training and service == "reward"
    users = [spec for spec in specs if spec.is_users or is_here]
    async with AsyncExitStack() as stack:
        pool: Pool | None = ProcessCopies(here, config.reward.deadline)
        if not is_here:
            pool = await _started(config, config.scorers[service], [*templates, *users], stack)
        if pool is not None:
            for number, spec in enumerate(templates):
                outcomes = [outcome for tried in rows if (outcome := await _of_row(pool, number, spec, tried))]
                said.append(_of_template(spec, outcomes))
            is_whole = len(users) == len([spec for spec in specs if spec.name != "overlong"])
            is_whole = is_whole and not (config.reward.model or config.feedback.asks or config.environment.use)
            is_whole = is_whole and is_training and service == "reward"
            said += await _of_users(pool, len(templates), users, rows, config, is_whole=is_whole, is_here=is_here)
    return [each for each in said if each]


async def _started(
    config: Config, section: RewardConfig, specs: Sequence[FunctionSpec], stack: AsyncExitStack
) -> SplitPool | None:
    """Starts the functions until the stack ends; None where they cannot start, which the run itself says better."""
    if not specs:
        return None
    kept = containment_of(config, [spec.use for spec in specs if spec.is_users])
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


async def _of_row(pool: Pool, number: int, spec: FunctionSpec, tried: TriedRow) -> Outcome | None:
    wrong, right = _known_answers(spec, tried.row)
    scores = await _scores(pool, number, _samples(tried.row, [*wrong.values(), *right.values()]))
    return None if isinstance(scores, str) else _outcome(tried.where, wrong, right, scores)


async def _scores(pool: Pool, number: int, samples: Sequence[Sample]) -> list[float] | str:
    """Returns the scores of one function; why there are none where it failed on one, or left it out."""
    results: list[FunctionResult] = await pool.run(number, samples)
    if reasons := [result.reason or "it returned None" for result in results if result.reason or result.value is None]:
        return reasons[0]
    return [_number(result) for result in results]


def _number(result: FunctionResult) -> float:
    """Returns the score of a sample; of rewards by token one that tells where they are."""
    if result.tokens:
        return sum(place * reward for place, reward in enumerate(result.tokens, 1))
    return float(sum(result.value.values()) if isinstance(result.value, dict) else result.value or 0.0)


def _outcome(where: str, wrong: Mapping[str, str], right: Mapping[str, str], scores: Sequence[float]) -> Outcome:
    named = [(name, text, score) for (name, text), score in zip([*wrong.items(), *right.items()], scores, strict=True)]
    return Outcome(where, named[: len(wrong)], named[len(wrong) :])


def _samples(row: Row, texts: Sequence[str], steps: int = 0, *, plays: bool = False) -> list[Sample]:
    """Returns samples of these texts, of which each word is a token. plays: as episodes of one turn."""
    made = []
    for member, text in enumerate(texts):
        words = text.split()
        sample = Sample(row.prompt, text, dict(row.columns), 0, member, "stop", len(words), steps=steps)
        made.append(replace(sample, token_ids=list(range(len(words))), token_texts=words))
    if not plays:
        return made
    turn = [[{"role": POLICY, "content": text}] for text in texts]
    return [
        replace(each, turns=own, turn_rewards=[0.0], turn_tokens=[each.tokens])
        for each, own in zip(made, turn, strict=True)
    ]


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
    pool: Pool,
    begin: int,
    specs: Sequence[FunctionSpec],
    rows: Sequence[TriedRow],
    config: Config,
    *,
    is_whole: bool,
    is_here: bool,
) -> list[tuple[bool, str] | None]:
    """Tries functions of the user until each has told two answers to one row apart. begin: number of the first one in
    the pool. is_whole: whether their sum is the whole reward. A function that fails is left to the run; where it may
    fail in the trial alone, of this process (is_here) or of episodes, that is said."""
    alike: dict[int, Outcome] = {}
    failed: dict[int, str] = {}
    totals = list[Outcome]()
    asked = set(range(len(specs)))
    for place, (where, row) in enumerate(rows):
        wrong, right = _free_answers(row)
        samples = _samples(row, [*wrong.values(), *right.values()], config.steps, plays=bool(config.environment.use))
        total = [0.0] * len(samples)
        for number in sorted(asked if not is_whole else range(len(specs))):
            found = await _scores(pool, begin + number, samples)
            scores = None if isinstance(found, str) else found
            outcome = None if scores is None else _outcome(where, wrong, right, scores)
            if isinstance(found, str):
                failed.setdefault(number, found)
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
    how = " as an episode of one turn" if config.environment.use else ""
    said = {
        number: f"on {each.where}: {each.as_words} both have {each.wrong[0][2]:g}, and so has each answer that was "
        f"tried{how}: is that meant?"
        for number, each in alike.items()
    }
    if how or is_here:
        said |= {number: f"could not be tried{how}: {why}" for number, why in failed.items()}
    return [(False, f"{specs[number].key}: {specs[number].use} {text}") for number, text in said.items()]


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
