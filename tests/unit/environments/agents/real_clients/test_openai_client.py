"""The real `openai` client against the endpoint, and agents of real libraries as environments."""

import asyncio
import json
import re
import shlex
import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.agents.agent import Agent
from asyncrl.environments.agents.chat_completions import ChatAnswer, ChatRequest, answer_of
from asyncrl.environments.agents.endpoint import AgentAccess, Endpoint
from asyncrl.environments.agents.exchanges import Exchanges
from asyncrl.environments.tools import FORMS, ToolCall
from asyncrl.environments.transcript import SampledAnswer

openai = pytest.importorskip("openai", reason="the extra agents is not installed")

ROOT = Path(__file__).parents[5]
PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}}}
TOOLS: Any = [{"type": "function", "function": {"name": "double", "parameters": PARAMETERS}}]
ASKS: Any = [{"role": "user", "content": "a"}]


class Policy:
    """Answers the requests of one episode with these texts."""

    def __init__(self) -> None:
        self.exchanges = Exchanges()
        self.access = AgentAccess("", "")
        self.seen: list[Any] = []

    def client(self, **settings: Any) -> Any:
        return openai.AsyncOpenAI(base_url=self.access.base_url, api_key=self.access.key, **settings)

    async def says(self, *texts: str) -> None:
        for text in texts:
            self.seen.append(self.exchanges.observation(await self.exchanges.next_request()))
            sampled = SampledAnswer(tuple(text), (-0.5,) * len(text), "stop", 7)
            self.exchanges.answer(partial(read_answer, text, sampled))


def read_answer(text: str, sampled: SampledAnswer, request: ChatRequest, turn: int) -> ChatAnswer:
    return answer_of(request, turn, text, sampled, FORMS["hermes"])


@pytest.fixture
async def policy() -> AsyncIterator[Policy]:
    made = Policy()
    number, made.access = await Endpoint.running().open(made.exchanges)
    yield made
    await Endpoint.running().close(number)


async def test_a_conversation_with_tools(policy: Policy) -> None:
    call = FORMS["hermes"].render([ToolCall("double", {"a": 2}), ToolCall("double", {"a": 3})])
    talking = asyncio.ensure_future(policy.says(f"I double.{call}", "4 and 6"))
    async with policy.client() as client:
        first = await client.chat.completions.create(model="gpt", messages=ASKS, tools=TOOLS, temperature=0.1)
        message = first.choices[0].message
        assert (message.content, first.choices[0].finish_reason) == ("I double.", "tool_calls")
        assert [json.loads(each.function.arguments) for each in message.tool_calls] == [{"a": 2}, {"a": 3}]
        results = [
            {"role": "tool", "tool_call_id": each.id, "content": str(2 * json.loads(each.function.arguments)["a"])}
            for each in message.tool_calls
        ]
        messages = [*ASKS, message, *results]
        second = await client.chat.completions.create(model="gpt", messages=messages, tools=TOOLS, logprobs=True)
    await talking
    assert second.choices[0].message.content == "4 and 6"
    assert [each.token for each in second.choices[0].logprobs.content] == list("4 and 6")
    assert second.usage.total_tokens == 14
    opening, results_seen = policy.seen
    assert opening.tools == tuple(TOOLS)
    assert results_seen.follows is None, "the client sends back what it got"
    assert [each["content"] for each in results_seen.text] == ["4", "6"]


async def test_a_stream(policy: Policy) -> None:
    call = FORMS["hermes"].render([ToolCall("double", {"a": 2})])
    talking = asyncio.ensure_future(policy.says("good day", call))
    async with policy.client() as client:
        options: Any = {"stream": True, "stream_options": {"include_usage": True}, "logprobs": True}
        stream = await client.chat.completions.create(model="gpt", messages=ASKS, **options)
        *chunks, last = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "good day"
        assert [c.choices[0].logprobs.content[0].logprob for c in chunks if c.choices[0].logprobs] == [-0.5] * 8
        assert last.usage.completion_tokens == 8
        async with client.chat.completions.stream(model="gpt", messages=ASKS, tools=TOOLS) as events:
            found = await events.get_final_completion()
    await talking
    assert found.choices[0].message.tool_calls[0].function.name == "double"
    assert found.choices[0].finish_reason == "tool_calls"


async def test_models_and_errors(policy: Policy) -> None:
    async with policy.client(max_retries=0) as client:
        assert [model.id async for model in client.models.list()] == ["policy"]
        assert (await client.models.retrieve("any")).id == "policy"
        with pytest.raises(openai.BadRequestError, match="send n requests") as refused:
            await client.chat.completions.create(model="gpt", messages=ASKS, n=2)
        assert refused.value.param == "n"
        with pytest.raises(openai.NotFoundError, match="chat/completions and models only"):
            await client.responses.create(model="gpt", input="a")
        with pytest.raises(openai.AuthenticationError, match="not that of this episode"):
            await client.with_options(api_key="other").models.retrieve("any")


async def test_a_client_that_times_out_asks_again_and_gets_the_one_answer(policy: Policy) -> None:
    async with policy.client(timeout=0.5, max_retries=5) as client:
        asking = asyncio.ensure_future(client.chat.completions.create(model="gpt", messages=ASKS))
        async with asyncio.timeout(60):
            await policy.exchanges.next_request()
            for _ in iter(lambda: policy.exchanges.counts["repeated"] > 0, True):
                await asyncio.sleep(0)
        policy.exchanges.answer(lambda request, turn: answer_of(request, turn, "late", None, FORMS["hermes"]))
        assert (await asking).choices[0].message.content == "late"
    assert policy.exchanges.turns == 1


def documented(name: str) -> str:
    """Returns the program of docs/environments.md that begins with this comment."""
    page = (ROOT / "docs/environments.md").read_text()
    (source,) = re.findall(rf"```python\n(# {re.escape(name)}\n.*?)```", page, re.DOTALL)
    return str(source)


async def test_the_agent_of_the_documentation(tmp_path: Path) -> None:
    file = tmp_path / "my_agent.py"
    file.write_text(documented("my_agent.py"))
    made = Agent(shlex.join([sys.executable, str(file)]), reward="last_line")
    try:
        assert (await made.reset({"prompt": "2 + 3?", "answer": "5"}, 0)).text == [
            {"role": "user", "content": "2 + 3?"}
        ]
        assert (await made.step("4")).text == [{"role": "user", "content": "Are you sure?"}]
        last = await made.step("5")
        assert (last.done, last.reward) == (True, 1.0)
    finally:
        await made.close()
