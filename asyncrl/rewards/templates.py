"""Templates of rewards: each function here makes a reward function from options in the config."""

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from ctypes import c_float
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal, get_args

from asyncrl.children.code.code_runner import SourceCheck, shared_runner
from asyncrl.children.code.program_extraction import Choice, code_in
from asyncrl.children.code.row_tests import cases_in
from asyncrl.children.sandbox import Program, SandboxError, TestCase
from asyncrl.children.sandbox.package_calls import PackageSandbox, Unjudged, package_sandbox
from asyncrl.children.sandbox.pool import Kind
from asyncrl.config.problems import Problem
from asyncrl.config.user_code import suggestion
from asyncrl.errors import ConfigError, RewardError, TaskError
from asyncrl.protocols.answer_text import PAIRS, composed, folded
from asyncrl.protocols.batch import NO_ROOM
from asyncrl.rewards.number_parser import last_number
from asyncrl.rewards.package_scores import letter, unit
from asyncrl.rewards.remote_judge import RemoteJudge
from asyncrl.rewards.sample import OfRow, OfSample, RowError, Sample, UnjudgedError

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

# Templates of rewards for programs. All of them run in sandboxes; the code in an answer is the last program in its
# fenced blocks, or without blocks the whole answer, behind what the row has in the column `before`. choose: "first"
# takes the first program of several. An answer without a program has 0. sandbox: what `children.sandbox` says.


SANDBOX = "sandbox"
"""Name of the option that is no option of users, for programs are contained as other code of a run is."""


def compiles(choose: Choice = "last", sandbox: Kind = "bubblewrap") -> OfSample:
    """Gives 1 if Python compiles the code of the completion, else 0. The code is not run."""
    _refuse_choice(choose)

    async def reward(sample: Sample) -> float:
        return float((await _checked(sample, choose, sandbox)).compiles)

    return reward


@dataclass(frozen=True, slots=True)
class ShareOfTests:
    """Gives the share of tests that a program passes; see `passes_tests`."""

    column: str
    seconds: float
    choose: Choice
    sandbox: Kind

    @property
    def overlapping(self) -> int:
        """Returns the number of cores: further calls would wait for a sandbox while `reward.deadline` runs."""
        return len(os.sched_getaffinity(0))

    def check_row(self, row: Mapping[str, Any]) -> tuple[TestCase, ...]:
        """Returns the tests of a row; raises TaskError where it has none."""
        return cases_in(row, self.column)

    async def __call__(self, sample: Sample) -> float:
        runner = shared_runner(self.sandbox)
        source = code_in(sample.answer, sample.row, self.choose)
        try:
            tests = self.check_row(sample.row)
        except TaskError as error:
            raise RowError(self.column, str(error)) from None
        try:
            if not source or not (await runner.check(source)).compiles:
                return 0.0
            results = await runner.run(Program(source, tests), self.seconds)
        except (SandboxError, TaskError) as error:
            raise RewardError(str(error)) from None
        return sum(result.passed for result in results) / len(tests)


def passes_tests(
    column: str = "tests", seconds: float = 3.0, choose: Choice = "last", sandbox: Kind = "bubblewrap"
) -> OfSample:
    """Gives the share of the row's tests that the code of the completion passes, 0 to 1; 0 if it does not compile.

    column: a list of texts with asserts that call functions of the program, or of tables with `stdin` and `stdout`, the
    text that the program reads and the text that it has to print; or the tests of a usual data set as they are (see
    asyncrl/children/code/row_tests.py). A test that asserts nothing is an error. seconds: that a test may take; once
    the tests of a program have taken so long, no further one begins, and the rest has failed.
    """
    if seconds <= 0:
        raise ConfigError(f"seconds must be more than 0, not {seconds:g}")
    _refuse_choice(choose)
    return ShareOfTests(column, seconds, choose, sandbox)


def lint(penalty: float = 0.25, choose: Choice = "last", sandbox: Kind = "bubblewrap") -> OfSample:
    """Gives 1 for code without a finding of the linter, and `penalty` less for each finding, down to 0; 0 if it does
    not compile.

    Findings are names that nothing defines, imports and local variables that nothing reads, statements without effect
    or never reached, bare `except`, mutable default values, `== None`, assertions of tuples, imports of `*`, f-strings
    with nothing to fill in, lambdas with a name, semicolons at the ends of lines, and what Python warns of.
    """
    if penalty <= 0:
        raise ConfigError(f"penalty must be more than 0, not {penalty:g}")
    _refuse_choice(choose)

    async def reward(sample: Sample) -> float:
        check = await _checked(sample, choose, sandbox)
        return max(0.0, 1.0 - penalty * len(check.findings)) if check.compiles else 0.0

    return reward


def _refuse_choice(choose: str) -> None:
    if choose not in get_args(Choice):
        raise ConfigError(f"choose is one of last, first, not {choose!r}{suggestion(choose, get_args(Choice))}")


async def _checked(sample: Sample, choose: Choice, sandbox: Kind) -> SourceCheck:
    if not (source := code_in(sample.answer, sample.row, choose)):
        return SourceCheck("there is no program in it", ())
    try:
        return await shared_runner(sandbox).check(source)
    except SandboxError as error:
        raise RewardError(str(error)) from None


Row = Mapping[str, Any]

SCORES = "asyncrl.rewards.package_scores"
"""File of the functions that packages need for an answer; it is imported in sandboxes only."""
SECONDS = 10.0
"""Seconds for one answer where no config says another deadline."""
RELATIVE = Fraction(1, 10**6)
"""Share of the larger of two numbers by which they may differ where one of them is not whole."""


def exact_match(column: str = "answer", ignore_case: bool = False) -> OfSample:
    """Gives 1 if the completion equals the row's `column`, else 0; white space around both is ignored, and characters
    that Unicode writes in two ways are equal. A number that tables have as 5.0 may be written 5, one of 32 bits in its
    shortest form, and a truth value as in JSON. An empty `column` is an error, as null is."""

    def reward(sample: Sample, wanted: list[str]) -> float:
        given = composed(sample.answer)
        written = map(composed, wanted)
        return float(folded(given) in map(folded, written) if ignore_case else given in written)

    return OfRow(lambda row: _writings(_value(row, column), column), reward)


def regex_format(pattern: str) -> OfSample:
    """Gives 1 if the whole completion, thoughts included, matches; a dot matches line breaks too. White space around
    the completion may be there or not, and a line break where the pattern wants one. Where the chat template opened
    thoughts, their opening mark may be in the pattern."""
    compiled = _compiled(pattern)

    def reward(sample: Sample) -> float:
        text = sample.text.strip()
        head, _, tail = sample.text.partition(text) if text else ("", "", sample.text)
        opened = [begin + gap for begin, end in PAIRS for gap in ("", "\n") if sample.opened and end in text]
        heads = dict.fromkeys(["", head, "\n", *opened])
        whole = (start + text + end for start in heads for end in dict.fromkeys(["", tail, "\n"]))
        return float(any(compiled.fullmatch(each) is not None for each in whole))

    return reward


def numeric(column: str = "answer", tolerance: float | None = None) -> OfSample:
    """Gives 1 if the last number of the completion is the row's `column`, else 0. By default a whole number
    in the row, 0 among them, has to be met exactly, as 12 or 12.0, and another one within a millionth (1e-6) of the
    larger of the two. tolerance: the share of the larger one by which all numbers may differ, whole ones too.

    A text that may mean several numbers holds none and gives 0, whatever stands before it; in the row it is an error.
    The number is what the last `\\boxed{}` or `\\fbox{}` holds, which must be one number; without a box the only value
    of a JSON object at the end, or its `answer`; else the last word with a digit.

    - A point is the decimal mark. Groups of three are thousands: 1,234.5, 1'234, 1_234, 1\\,234, and 1 234 with a thin
      or non-breaking space. 1.234,5 has both marks and is 1234.5; 1,2 and 0,5 and 1.234.567 are no numbers.
    - A sign stands directly before a number, or with a space behind `=` or at the beginning of a box. Minus signs of
      Unicode are minus signs.
    - 3/4, \\frac{3}{4}, ¾ and 1 3/4 are fractions. 1e3, 1.5E-4, 2 x 10^3 and 10^3 are powers of ten, up to 308; 2^3 is
      no number.
    - Percent, currencies and units leave the number what it is: 50%, $50, 50 km, 50km and 50 cm^2 are 50. Words from
      `hundred` to `trillion` and `dozen` multiply it, and so do 百, 千, 万 and 亿; 50k and 50M are no numbers.
    - Digits of all scripts are digits, and full-width characters are those of ASCII. Chinese, Japanese, Korean and Thai
      words end where a number begins: 12 in 答案是12。 and 12元. Numbers in words (five, 十二, 三分之一) are none.
    - `!` behind a number at the end of a sentence is no factorial; in a box or expression it is one, and no number.
    - A box that is a part of an expression (2\\boxed{12}, \\boxed{12} million) holds none.
    - Ranges, intervals, lists, tuples, matrices, choices (3 or 4, 3 (or 4), 3 kg or 4 kg, x = 3 or x = 4), expressions
      (7-3, x + 1, minus 5, ln 5), quantities of several numbers (5 ft 10 in, 2 hours 30 minutes, 2小时30分钟), bounds
      (> 5, at least 5, 5以上), denials (not 5, 5 is wrong), half of 5, dates,
      times, versions, names with digits (GPT-4) and numbers of items in a list are no numbers.
    - Behind a number, what only says where it comes from, how it is rounded, or a year in brackets, is none: 12 (see
      Figure 3), 12, see eq. 5, 12 by theorem 4, 12 [7], 12 (rounded to 2 decimals) and 12 (in 2024) are 12. A remark in
      brackets with another value (12 apples (3 each)), or a year (12 km in 1999), makes it unclear which is meant; one
      that concludes (8 (and so 72)) says the answer.
    """
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ConfigError(f"tolerance is a share of the number, at least 0 and under 1, not {tolerance!r}")
    share = None if tolerance is None else Fraction(str(tolerance))

    def wanted(row: Row) -> Fraction:
        value = _value(row, column)
        found = None if isinstance(value, list | Mapping) else last_number(str(value))
        if found is None:
            raise RowError(
                column, f"the row's {column} holds no number, or one that may mean several things: {value!r:.200}"
            )
        return found

    def reward(sample: Sample, wanted: Fraction) -> float:
        given = last_number(sample.answer)
        if given is None or (share is None and wanted.denominator == 1):
            return float(given == wanted)
        return float(abs(given - wanted) <= (RELATIVE if share is None else share) * max(abs(given), abs(wanted)))

    return OfRow(wanted, reward)


def math_verify(column: str = "answer", sandbox: Kind = "bubblewrap", seconds: float = SECONDS) -> OfSample:
    """Gives 1 if the last expression of the completion equals the row's `column` by the package math-verify, else 0:
    1/2, 0.5 and \\frac{1}{2} are equal, and so are sets, intervals and equations. Of a column with `####` what stands
    behind it counts.

    Of several boxes the last one counts; without a box it is the last expression that the package finds, or what
    `numeric` reads where it finds none. Values that the package calls equal, but that differ beyond rounding of
    decimals (2e-6 of their size), are not: it calls 2^{-98} and 2^{-99} equal. A row that is a single capital letter is
    a choice, which `(A)` and `The answer is A.` name. 5 cm is not 5 km, 2516_9 not 2516_8, and 1e-07 is a power of ten.
    An answer whose brackets are more than 12 deep, or that is not judged within `reward.deadline`, such as 9^{9^{9^9}},
    has 0, which the log tells once. The package reads answers in a sandbox for programs.
    """
    packages = package_sandbox(SCORES, ("math_verify", "sympy"), sandbox)

    def reward(sample: Sample, text: str) -> float:
        if choice := re.fullmatch(r"[$(]*([A-Z])[)$]*", text):
            return float(letter(sample.answer) == choice[1])
        if (wanted_unit := unit(text)) and unit(sample.answer) not in ("", wanted_unit):
            return 0.0
        value = _read(packages, "math_verify", text, sample.answer, seconds, column)
        if value is None:
            raise RowError(column, f"math-verify finds no expression in the row's {column}: {text!r:.200}")
        return value

    return OfRow(lambda row: _expression(_value(row, column), column), reward, packages.warm_up)


def length(
    maximum: int, slack: int, unit: Literal["tokens", "characters", "words", "row_tokens"] = "tokens"
) -> OfSample:
    """Gives 0 up to `maximum - slack`, then falls to -1 at `maximum`: DAPO (arXiv 2503.14476, equation 13). unit:
    `tokens` counts the sampled ones, `row_tokens` those of an environment too; an episode that ended for want of room
    has them all."""
    if not 0 < slack <= maximum:
        raise ConfigError(f"slack must lie between 1 and maximum ({maximum}), not {slack}")
    measures: dict[str, Callable[[Sample], int]] = {
        "tokens": lambda sample: sample.tokens,
        "row_tokens": lambda sample: maximum if sample.finish == NO_ROOM else sample.tokens + sample.given,
        "characters": lambda sample: len(sample.text),
        "words": lambda sample: len(sample.text.split()),
    }
    if unit not in measures:
        raise ConfigError(f"there is no unit {unit}{suggestion(unit, measures)}")
    measure = measures[unit]
    return lambda sample: -min(1.0, max(0.0, (measure(sample) - (maximum - slack)) / slack))


def repetition(words: int = 3) -> OfSample:
    """Gives minus the share of runs of `words` words that occurred before in the completion: 0 down to -1."""
    if words < 1:
        raise ConfigError(f"words must be at least 1, not {words}")

    def reward(sample: Sample) -> float:
        said = sample.text.lower().split()
        runs = Counter(zip(*(said[start:] for start in range(words)), strict=False))
        return len(runs) / runs.total() - 1.0 if runs else 0.0

    return reward


def reasoning_gym(pattern: str = "", sandbox: Kind = "bubblewrap", seconds: float = SECONDS) -> OfSample:
    """Gives the score that the prompt's reasoning-gym data set gives, 0 to 1. pattern: the answer is its first group in
    the last match; by default it is the whole completion. Some of these data sets evaluate answers as Python: they read
    them in a sandbox for programs, where an answer that is code has the score of nonsense."""
    compiled = _compiled(pattern) if pattern else None
    packages = package_sandbox(SCORES, ("reasoning_gym", "sympy"), sandbox)

    def reward(sample: Sample, origin: Mapping[str, Any]) -> float:
        answer: str | None = sample.answer.strip()
        if compiled is not None:
            matches = list(compiled.finditer(sample.answer))
            answer = str(matches[-1][min(1, compiled.groups)]).strip() if matches else None
        entry = json.dumps({name: origin[name] for name in ("name", "options", "index", "answer")}, default=str)
        value = _read(packages, "reasoning_gym", entry, json.dumps(answer), seconds, "reasoning_gym")
        return 0.0 if value is None else value

    return OfRow(_origin, reward, packages.warm_up)


def _read(packages: PackageSandbox, name: str, wanted: str, text: str, seconds: float, column: str) -> float | None:
    """Returns the score that a package gives a text; raises RewardError where none can be had."""
    try:
        value = packages.read(name, wanted, text, seconds)
    except Unjudged as error:
        raise UnjudgedError(f"{name} could not judge the answer: {error}") from None
    except SandboxError as error:
        raise RewardError(str(error)) from None
    if isinstance(value, str):
        raise RowError(column, f"{name} cannot use the row's {column}: {value}")
    return value


def environment() -> OfSample:
    """Gives the sum of the rewards that the environment gave in the episode, turn by turn."""
    return lambda sample: sum(sample.turn_rewards)


ENVIRONMENT = environment.__name__
"""Name of the template that needs an environment; without other functions it is the whole reward of an episode."""

PENALTIES = (length.__name__, repetition.__name__)
"""Templates that give 0 down to -1; the others give 0 to 1, but for `environment`, which is as its episodes are."""

JUDGE_TEMPLATE = "judge"
"""Name of the template that asks a language model behind a URL."""

OF_TEXT: tuple[Callable[..., OfSample], ...] = (
    exact_match,
    regex_format,
    numeric,
    math_verify,
    length,
    repetition,
    reasoning_gym,
    environment,
)
OF_CODE: tuple[Callable[..., OfSample], ...] = (compiles, passes_tests, lint)
CODE_TEMPLATES = {made.__name__: made for made in OF_CODE}
TEMPLATES = {made.__name__: made for made in OF_TEXT} | CODE_TEMPLATES | {JUDGE_TEMPLATE: RemoteJudge}
"""Templates by name. What parses an answer for each, and where, is a table of SECURITY.md."""


def _column(row: Row, name: str) -> Any:
    if name not in row:
        raise RowError.missing(name, row)
    return row[name]


def _value(row: Row, name: str) -> Any:
    """Returns the value of a column of answers. Raises RowError for none: null, the NaN of tables, or no text."""
    value = _column(row, name)
    if value is None or value != value or (isinstance(value, str) and not value.strip()):
        raise RowError(name, f"the row's {name} is {value!r:.80}: write an answer, or remove the row", advice="")
    if isinstance(value, bytes | bytearray | memoryview):
        raise RowError(name, f"the row's {name} is bytes, {value!r:.80}: decode them to text", advice="")
    return value


def _expression(value: Any, column: str) -> str:
    """Returns the text of an expression. Parsing it takes too long for all rows of a source, and is left to scoring:
    raises RowError where nothing can be parsed."""
    text = str(value).rpartition("####")[2].strip().replace("\\$", "")
    if isinstance(value, list | Mapping) or not text.replace("boxed{}", "").strip("$\\ "):
        raise RowError(column, f"the row's {column} holds no expression: {value!r:.200}")
    return text


def _origin(row: Row) -> Mapping[str, Any]:
    """Returns what a row says of its entry of a reasoning-gym data set."""
    origin = _column(row, "reasoning_gym")
    if not isinstance(origin, Mapping) or not {"name", "options", "index"} <= {*origin}:
        raise RowError("reasoning_gym", f"the row's reasoning_gym does not name an entry of a data set: {origin!r:.80}")
    return {**origin, "answer": None if (answer := row.get("answer")) is None else str(answer)}


def _writings(value: Any, column: str) -> list[str]:
    """Returns the texts that mean a value of a row. Raises RowError for lists and tables."""
    if isinstance(value, list | Mapping):
        raise RowError(
            column,
            f"the row's {column} is {json.dumps(value, default=str)[:80]}, and exact_match compares texts: name a "
            "column of texts, or write a function",
            advice="",
        )
    writings = [str(value).strip()]
    if isinstance(value, bool):
        writings.append(json.dumps(value))
    elif isinstance(value, float) and value.is_integer():
        writings.append(str(int(value)))
    elif isinstance(value, float) and c_float(value).value == value:
        shorter = (float(f"{value:.{digits}g}") for digits in range(1, 18))
        writings.append(str(next(each for each in shorter if c_float(each).value == value)))
    elif re.fullmatch(r"[-+]?\d+\.0", writings[0]):
        writings.append(writings[0].removesuffix(".0"))
    return writings


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(f"{pattern!r} is no regular expression: {error}") from None


# Says which answers pass: a threshold with room for the rounding of sums, and whether any answer can reach it.


TESTS = passes_tests.__name__
"""Term by which programs pass, if no other one is named."""
ROUNDING = 5e-7
"""Share of what was added up by which a sum may miss a threshold that it reaches on paper: weights of 0.7, 0.2 and 0.1
make 0.9999999999999999, and functions that compute in float32 lose 1e-7 in each sum."""


def reaches(value: float, threshold: float, summed: float = 0.0) -> bool:
    """Returns whether a sum of floats is the threshold or more, but for rounding. summed: the absolute values that were
    added, in all, where they are larger than their sum."""
    return value >= threshold - ROUNDING * max(abs(value), abs(threshold), summed)


def pass_problems(config: "Config") -> Iterator[Problem]:
    """Yields, for each held-out set with pass@k, that its rewards have no term of the name by which answers pass, or a
    warning that none can pass, as far as names and the largest reward are known. Functions of the user are taken to
    give at most 1, and the warning says so."""
    threshold = config.evaluate.pass_reward
    for each in config.evaluate.held_out:
        functions = each.functions or config.reward.functions
        key = f"{each.section}.pass_term"
        names = [one.term for one in functions]
        deciding = [one for one in functions if one.term == (each.pass_term or TESTS)]
        if each.samples == 1 or not functions or (config.reward.model and not each.functions):
            continue
        if each.pass_term and not deciding:
            if each.pass_term.partition("/")[0] not in (*names, "overlong"):
                text = f"the rewards of these prompts have no term {each.pass_term}{suggestion(each.pass_term, names)}"
                yield Problem(key, "", text)
            continue
        parts = [(one, 1.0 if deciding else one.weight) for one in deciding or functions]
        most = sum(max(0.0, -weight if one.use in PENALTIES else weight) for one, weight in parts)
        is_open = any(one.use == ENVIRONMENT or one.by_token for one, _ in parts)
        if is_open or reaches(most, threshold, sum(abs(weight) for _, weight in parts)):
            continue
        own = " and ".join(one.use for one, _ in parts if ":" in one.use)
        unless = f"with values of {own} up to 1 " if own else ""
        what = f"the term {deciding[0].term}" if deciding else "the weighted sum of the terms"
        best = max(functions, key=lambda one: one.weight).term
        text = (
            f"{unless}no answer can pass, and pass@k stays 0: {what} is at most {most:g}, and evaluate.pass_reward is "
            f'{threshold:g}; write {key} = "{best}", the name of a term, or a pass_reward that can be reached'
        )
        yield Problem(key, "", text, is_warning=True)
