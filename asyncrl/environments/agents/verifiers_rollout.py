"""A program that plays one task of a task set of verifiers, and prints its reward: `TASKSET INDEX`.

It is an agent (agent.py), and imports nothing of asyncrl, so that it runs with the packages of another Python. The
model is asked in this process: the harnesses of verifiers start a process of their own for each rollout, with packages
that they install then.
"""

import asyncio
import os
import sys
from types import ModuleType
from typing import Any, NoReturn

HARNESS = "asyncrl_chat_harness"
"""Name of a module, by which verifiers finds the harness."""
MODEL = "policy"


def main() -> None:
    """Plays the task; the last line of the output is the reward."""
    if len(sys.argv) != 3 or not sys.argv[2].isdecimal():
        _fail(f"write TASKSET INDEX, not {sys.argv[1:]}: the row needs a column `index` with the number of the task")
    sys.path.insert(0, os.getcwd())  # A task set may be a file of the user's.
    print(asyncio.run(_reward(sys.argv[1], int(sys.argv[2]))))  # noqa: T201


def _fail(why: str) -> NoReturn:
    """Ends the program. What it prints is in the error of the episode."""
    print(why)  # noqa: T201
    sys.exit(1)


async def _reward(taskset: str, index: int) -> float:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import environment_class

    _offer_harness(vf)
    agent = {"harness": {"id": HARNESS}, "runtime": {"type": "subprocess"}}
    config = vf.SingleAgentEnvConfig.model_validate({"taskset": {"id": taskset}, "agent": agent})
    if environment_class(taskset) is not vf.SingleAgentEnv:
        _fail(f"the task set {taskset} is for several agents, and one policy plays")
    environment = vf.SingleAgentEnv(config)
    tasks = list(environment.taskset.skip(index).take(1))
    if not tasks:
        _fail(f"the task set {taskset} has no task {index}")
    client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    async with environment.serving():
        episode = await environment.run_episode(tasks[0], vf.ModelContext(model=MODEL, client=client))
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if errors or not episode.traces:
        _fail(f"the rollout failed: {'; '.join(f'{error.type}: {error.message}' for error in errors)}")
    return float(episode.traces[0].reward)


def _offer_harness(vf: Any) -> None:
    """Makes a harness that verifiers can import: one request for each turn, without tools."""
    import httpx
    from verifiers.v1.dialects.chat import message_to_wire

    class ChatHarnessConfig(vf.HarnessConfig):  # type: ignore[misc]  # Another Python has verifiers, and its types.
        """Keys of the harness."""

    class ChatHarness(vf.Harness[ChatHarnessConfig]):  # type: ignore[misc]  # As above.
        """Asks the model for the answer to the task."""

        APPENDS_SYSTEM_PROMPT = True
        SUPPORTS_RESUME = True
        EXECUTES_CODE = False
        NEEDS_CONTAINER = False

        async def launch(
            self, ctx: Any, trace: Any, runtime: Any, endpoint: str, secret: str, mcp_urls: Any, data: Any, **rest: Any
        ) -> Any:
            system, prompt = self.resolve_prompt(data)
            messages = [{"role": "system", "content": system}] if system else []
            asked = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else map(message_to_wire, prompt)
            body = {"model": ctx.model, "messages": [*messages, *asked]}
            headers = {"authorization": f"Bearer {secret}"}
            async with httpx.AsyncClient(timeout=None) as client:
                answer = await client.post(f"{endpoint}/chat/completions", json=body, headers=headers)
            failed = "" if answer.status_code == 200 else answer.text
            return vf.ProgramResult(exit_code=int(bool(failed)), stdout="", stderr=failed)

    module: Any = ModuleType(HARNESS)
    ChatHarness.__module__ = HARNESS
    module.ChatHarness = ChatHarness
    module.__all__ = ["ChatHarness"]
    sys.modules[HARNESS] = module


if __name__ == "__main__":
    main()
