"""Templates of rewards for programs. All of them run in sandboxes; the code in an answer is the last program in its
fenced blocks, or without blocks the whole answer, behind what the row has in the column `before`. choose: "first" takes
the first program of several. An answer without a program has 0. sandbox: what `children.sandbox` says."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_args

from asyncrl.children.code.code_runner import SourceCheck, shared_runner
from asyncrl.children.code.program_extraction import Choice, code_in
from asyncrl.children.code.row_tests import cases_in
from asyncrl.children.sandbox import Program, SandboxError, TestCase
from asyncrl.children.sandbox.pool import Kind
from asyncrl.config.user_code import suggestion
from asyncrl.errors import ConfigError, RewardError, TaskError
from asyncrl.rewards.sample import OfSample, RowError, Sample

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
        runner, source = shared_runner(self.sandbox), code_in(sample.answer, sample.row, self.choose)
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


CODE_TEMPLATES: dict[str, Callable[..., OfSample]] = {made.__name__: made for made in (compiles, passes_tests, lint)}
