"""An agent as an environment: a program whose calls of a model are the turns of an episode."""

import asyncio
import json
import os
import re
import shlex
import shutil
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from asyncrl.children.containment import Containment, exit_status
from asyncrl.concurrency import gather
from asyncrl.config.user_code import suggestion
from asyncrl.environments.adapters.packages import package
from asyncrl.environments.agents.chat_completions import answer_of
from asyncrl.environments.agents.exchanges import AgentFailed, Exchanges
from asyncrl.environments.observation import Observation
from asyncrl.environments.tools.call_formats import form_named
from asyncrl.environments.transcript import SampledAnswer
from asyncrl.errors import ConfigError

if TYPE_CHECKING:
    from asyncrl.environments.agents.endpoint import Endpoint

# The process of an agent: started with a row, watched, and ended with everything that it started.


GUARD = (sys.executable, "-m", "asyncrl.children.guard_program", "asyncrl.environments.agents.exec_program")
LARGEST_OUTPUT = 16 * 2**10
"""Bytes of standard output and of errors that are kept: their ends."""
BLOCK = 2**16
KILL_SECONDS = 5.0
"""Seconds that the kernel may take to end a killed process."""


@dataclass(eq=False, slots=True)
class AgentProgram:
    """A running program. output, errors: the ends of what it writes. done: its exit status, after all of its output."""

    process: Process
    output: bytearray
    errors: bytearray
    done: "asyncio.Task[int]"

    @classmethod
    async def start(
        cls, words: Sequence[str], given: bytes, variables: Mapping[str, str], containment: Containment | None
    ) -> "AgentProgram":
        """Starts a program that reads `given` from its standard input. containment: None: nothing contains it."""
        stdin = os.memfd_create("asyncrl-row")
        try:
            os.write(stdin, given)
            os.lseek(stdin, 0, os.SEEK_SET)
            process = await asyncio.create_subprocess_exec(
                *([] if containment is None else containment.command()),
                *GUARD,
                str(stdin),
                *words,
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=dict(variables),
                pass_fds=(stdin,),
                start_new_session=True,
            )
        finally:
            os.close(stdin)
        output = bytearray()
        errors = bytearray()
        reading = _read(process, output, errors, is_contained=containment is not None)
        done = asyncio.create_task(reading, name=f"agent {process.pid}")
        return cls(process, output, errors, done)

    async def end(self) -> None:
        """Ends the program and all that it started, at once."""
        assert self.process.stdin is not None
        self.process.stdin.close()  # The guard waits for that.
        await asyncio.wait({self.done}, timeout=KILL_SECONDS)
        if not self.done.done():  # The program may have stopped the guard.
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.done.cancel()
        if self.errors:
            os.write(sys.stderr.fileno(), bytes(self.errors) + b"\n")  # Beside what other environments print.
            self.errors.clear()


async def _read(process: Process, output: bytearray, errors: bytearray, *, is_contained: bool) -> int:
    """Keeps the ends of both outputs until the program has ended, and returns its status."""
    assert process.stdout is not None
    assert process.stderr is not None
    await gather(_keep_end(process.stdout, output), _keep_end(process.stderr, errors))
    status = await process.wait()
    return exit_status(status) if is_contained else status


async def _keep_end(stream: asyncio.StreamReader, kept: bytearray) -> None:
    while block := await stream.read(BLOCK):
        kept += block
        del kept[:-LARGEST_OUTPUT]


KEY = "environment.options"
COLUMN = re.compile(r"\{(\w+)\}")
PYTHON = ("python", "python3")
"""Names of the Python that runs asyncrl, whose packages the agent uses, whether or not its environment is activated."""
ROLE = "agent"
"""Role of the last message of an episode: what the agent printed. The policy is not shown it."""
REWARDS = ("none", "last_line")
EXCERPT = 500
Reward = Literal["none", "last_line"]


class Agent:
    """Runs `command`, as a shell splits it, for each episode. `{NAME}` in it becomes a column of the row, or `{seed}`;
    the row is the program's standard input, as JSON. It gets OPENAI_BASE_URL and OPENAI_API_KEY, and `variables`. form:
    of the calls of tools in the policy's answers. reward: "last_line" takes the number that the agent prints last;
    "none" leaves rewards to reward functions, which see what it printed as the last message. containment: fields of a
    Containment for each program, which reaches no other one; None: nothing contains it."""

    def __init__(
        self,
        command: str,
        variables: Mapping[str, str] | None = None,
        form: str = "hermes",
        reward: Reward = "none",
        containment: Mapping[str, Any] | None = None,
    ) -> None:
        if not (words := shlex.split(command)):
            raise ConfigError('environment.use is "agent:" and a command, such as "agent:python agent.py"')
        if words[0] in PYTHON:
            words[0] = sys.executable
        if shutil.which(words[0]) is None:
            raise ConfigError(f"environment.use: there is no program {words[0]}")
        if reward not in REWARDS:
            raise ConfigError(f"{KEY}.reward: there is no {reward!r}{suggestion(str(reward), REWARDS)}")
        package("starlette", "serve")
        package("uvicorn", "serve")
        self._words = words
        self._variables = {str(name): str(value) for name, value in (variables or {}).items()}
        self._form = form_named(form, f"{KEY}.form")
        self._reward = reward
        self._containment = None if containment is None else Containment(**containment)
        self._exchanges = Exchanges()
        self._program: AgentProgram | None = None
        self._number: int | None = None
        self.waits_for = ""

    async def reset(self, row: dict[str, Any], seed: int) -> Observation:
        """Starts the agent; what it asks first is the prompt."""
        self._number, access = await _endpoint().open(self._exchanges)
        local = ",".join(filter(None, (os.environ.get("NO_PROXY", ""), "127.0.0.1")))
        own = {"OPENAI_BASE_URL": access.base_url, "OPENAI_API_KEY": access.key, "NO_PROXY": local, "no_proxy": local}
        given = json.dumps(row, ensure_ascii=False).encode("utf-8", "replace")
        words = [_filled(word, {**row, "seed": seed}) for word in self._words]
        variables = {**os.environ, **own, **self._variables}
        self._program = await AgentProgram.start(words, given, variables, self._containment)
        return await self._observed()

    async def step(self, message: str, sampled: SampledAnswer | None = None, opened: bool = False) -> Observation:
        """Answers what the agent asked, and waits until it asks again or ends."""
        self._exchanges.answer(lambda request, turn: answer_of(request, turn, message, sampled, self._form, opened))
        return await self._observed()

    async def close(self) -> None:
        """Ends the agent and everything that it started."""
        if self._program is not None:
            await self._program.end()
        if self._number is not None:
            await _endpoint().close(self._number)
            self._number = None

    async def _observed(self) -> Observation:
        """Returns the next request of the agent, or its end."""
        assert self._program is not None, "reset comes first"
        self.waits_for = f"the agent `{shlex.join(self._words)}` made no request and did not end"
        asking = asyncio.create_task(self._exchanges.next_request())
        try:
            await asyncio.wait({asking, self._program.done}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return self._exchanges.observation(asking.result())
        finally:
            asking.cancel()
        return self._ended(self._program)

    def _ended(self, program: AgentProgram) -> Observation:
        """Returns the last observation: what the agent printed, and its reward."""
        status = program.done.result()
        output = _text(program.output)
        errors = _text(program.errors)
        shown = f"; it printed {output[-EXCERPT:]!r}, and as errors:\n{errors[-EXCERPT:].strip()}".rstrip("\n")
        if status:
            how = f"exited with status {status}" if status > 0 else f"was ended by signal {-status}"
            raise AgentFailed(f"the agent {how}{shown}")
        if not self._exchanges.turns:
            raise AgentFailed(f"the agent exited without a request to OPENAI_BASE_URL{shown}")
        reward = self._printed_reward(output) if self._reward == "last_line" else 0.0
        return Observation([{"role": ROLE, "content": output}], reward, done=True, info=dict(self._exchanges.counts))

    def _printed_reward(self, output: str) -> float:
        lines = output.split("\n")
        last = next((line for line in reversed(lines) if line.strip()), "")
        try:
            return float(last)
        except ValueError:
            raise AgentFailed(
                f'{KEY}.reward is "last_line", and the last line that the agent printed is no number: {last!r:.80}'
            ) from None


def _endpoint() -> "Endpoint":
    """Returns the endpoint of this event loop. What it needs is imported where an agent begins."""
    from asyncrl.environments.agents.endpoint import Endpoint

    return Endpoint.running()


def _text(data: bytearray) -> str:
    return data.decode("utf-8", "replace")


def _filled(word: str, values: Mapping[str, Any]) -> str:
    """Returns a word of the command with the values of the columns that it names; other braces stay."""

    def value(found: re.Match[str]) -> str:
        if found[1] not in values:
            return found[0]
        given = values[found[1]]
        return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)

    return COLUMN.sub(value, word)


VERIFIERS_PROGRAM = Path(__file__).with_name("verifiers_rollout.py")


class VerifiersTaskset(Agent):
    """Plays the task number `index`, a column of the row, of a task set for one agent without tools. id: its module.
    python: the interpreter that has verifiers, which need not be the one of asyncrl. The reward is that of verifiers.
    """

    def __init__(
        self,
        id: str,
        python: str = "",
        variables: Mapping[str, str] | None = None,
        containment: Mapping[str, Any] | None = None,
    ) -> None:
        if not id:
            raise ConfigError('environment.use is "verifiers:" and a task set, such as "verifiers:gsm8k-v1"')
        command = [python or sys.executable, "-P", str(VERIFIERS_PROGRAM), id, "{index}"]
        super().__init__(shlex.join(command), variables, reward="last_line", containment=containment)
