"""The environment `repair`: runs the policy's program, and shows it a test that fails, so that it may write another."""

from typing import Any

from asyncrl.children.code.code_runner import shared_runner
from asyncrl.children.code.program_extraction import code_in
from asyncrl.children.code.row_tests import cases_in
from asyncrl.children.sandbox import CaseResult, Program, TestCase
from asyncrl.children.sandbox.pool import Kind
from asyncrl.environments.observation import Observation
from asyncrl.errors import ConfigError
from asyncrl.protocols.answer_text import split_thoughts

BROKEN = "error:"
"""Text with which a brief environment answers a program that does not compile."""
WITHHELD = "?:"
END = ":"


class ProgramRepair:
    """Tests each program in a sandbox. The episode ends when all tests pass; else the policy is shown why the program
    does not compile, or the first test that failed, and answers again, up to `environment.max_turns`.

    The rewards of an episode sum up to the share of tests that its last program passes; one that does not compile
    passes none. column, seconds: of the tests, as for the reward `passes_tests`; `environment.deadline` has to cover
    the wait for the programs of other episodes too. brief: says nothing but the test, for tiny models. withhold: does
    not even say that. sandbox: what `children.sandbox` says.
    """

    def __init__(
        self,
        column: str = "tests",
        seconds: float = 3.0,
        brief: bool = False,
        withhold: bool = False,
        sandbox: Kind = "bubblewrap",
    ) -> None:
        if seconds <= 0:
            raise ConfigError(f"environment.options: seconds must be more than 0, not {seconds:g}")
        self._column = column
        self._seconds = seconds
        self._brief = brief
        self._withhold = withhold
        self._sandbox: Kind = sandbox
        self._row: dict[str, Any] = {}
        self._tests: tuple[TestCase, ...] = ()
        self._share = 0.0

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        self._row = row
        self._tests = cases_in(row, self._column)
        self._share = 0.0
        return Observation(row["prompt"])

    async def step(self, message: str, opened: bool = False) -> Observation:
        source = code_in(split_thoughts(message, opened)[1], self._row)
        runner = shared_runner(self._sandbox)
        check = await runner.check(source)
        results = await runner.run(Program(source, self._tests), self._seconds) if check.compiles else ()
        share = sum(result.passed for result in results) / len(self._tests)
        gained = share - self._share
        self._share = share
        info = {"compiles": check.compiles, "passed": share}
        if share == 1.0:
            return Observation("", reward=gained, done=True, info=info)
        return Observation(self._complaint(check.error, results), reward=gained, info=info)

    def _complaint(self, error: str, results: tuple[CaseResult, ...]) -> str:
        if self._withhold:
            return WITHHELD
        if error:
            return BROKEN if self._brief else f"The program does not compile: {error}\nWrite all of it again."
        number = next((number for number, result in enumerate(results) if not result.passed), len(results))
        result = results[number] if number < len(results) else None  # None: tests before it took all the seconds.
        test = self._tests[number]
        printed = f", not {result.stdout!r}" if result else ""
        said = test.code or f"for the input {test.stdin!r} it has to print {test.stdout!r}{printed}"
        if self._brief:
            return said + END
        why = f"{result.outcome}: {result.detail}" if result else f"not run: those before it took {self._seconds:g} s"
        return f"A test fails ({why}):\n{said}\nWrite all of the program again."
