"""Agents as environments: what they ask is observed, answered by the policy, and they end with their episode."""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from asyncrl.environments.agents.agent import Agent
from asyncrl.environments.agents.exchanges import AgentFailed
from asyncrl.environments.loading import EnvironmentSpec, load
from asyncrl.environments.observation import Observation
from asyncrl.environments.transcript import SampledAnswer
from asyncrl.errors import ConfigError
from tests import golden
from tests.processes import alive
from tests.unit.environments.agents.conftest import MakeAgent, until

ROW = {"prompt": "What is 2 + 3?", "answer": 5}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def message(role: str, content: str, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def counted(observation: Observation) -> dict[str, int]:
    return {name: number for name, number in observation.info.items() if number and name != "requests"}


async def test_an_episode_is_what_the_agent_asks(agent: MakeAgent) -> None:
    """New messages only follow an answer; the row is the input of the program, and columns are arguments."""
    source = """
row = json.loads(sys.stdin.read())
first = ask({"role": "system", "content": "Be short."}, user(row["prompt"] + " " + sys.argv[1]))
history = [{"role": "system", "content": "Be short."}, user(row["prompt"] + " " + sys.argv[1]), first, user("Sure?")]
second = ask(*history)
print("said", first["content"], "and", second["content"])
print(float(int(second["content"]) == row["answer"]))
"""
    made = agent(source, "{answer} {seed} {other}", reward="last_line")
    opening = await made.reset(ROW, 7)
    assert opening.text == [message("system", "Be short."), message("user", "What is 2 + 3? 5 7 {other}")]
    second = await made.step("4")
    assert (second.text, second.follows, second.done) == ([message("user", "Sure?")], None, False)
    last = await made.step("5")
    assert last.text == [message("agent", "said 4 and 5\n1.0\n")]
    assert (last.done, last.reward, counted(last)) == (True, 1.0, {})


async def test_calls_of_tools_are_read_and_their_results_follow(agent: MakeAgent) -> None:
    source = f"""
tools = [{TOOL!r}]
first = ask(user("Add."), tools=tools)
calls = [{{"role": "tool", "tool_call_id": call["id"], "content": "5"}} for call in first["tool_calls"]]
print(json.dumps(first))
last = ask(user("Add."), first, *calls, tools=tools)
print(last)
"""
    made = agent(source)
    opening = await made.reset(ROW, 0)
    assert opening.tools == (TOOL,)
    said = 'I add.<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>'
    results = await made.step(said)
    assert results.text == [message("tool", "5", tool_call_id="call00100", name="add")]
    assert results.follows is None
    last = await made.step('<tool_call>{"name": 5}</tool_call>')
    printed = last.text[0]["content"].splitlines()
    first = json.loads(printed[0])
    assert first["content"] == "I add."
    assert first["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 2}'}
    assert '"tool_calls"' not in printed[1]
    assert "<tool_call>" in printed[1], "a call that cannot be read is text"


async def test_other_histories_begin_contexts_and_are_counted(agent: MakeAgent) -> None:
    source = """
a = ask(user("a"))
ask(user("summary of a"))
ask(user("a"), a, user("goes on"))
ask(user("a"), a, user("another branch"))
ask(user("a"), a, {"role": "system", "content": "no user"}, user("x"))
ask(user("a"), {"role": "assistant", "content": "never said"}, user("x"))
ask(user("a"), a, user("goes on"), stop=["b", "c"])
ask(user("a"), a, user("goes on"), {"role": "assistant", "content": "a"}, user("after a cut"))
"""
    made = agent(source)
    assert (await made.reset(ROW, 0)).follows is None
    seen = [await made.step(text) for text in "12345678"[:6]]
    assert [each.follows for each in seen] == [0, 1, 1, 0, 0, 1]
    assert seen[0].text == [message("user", "summary of a")]
    assert seen[1].text == [message("user", "goes on")]
    assert [each["role"] for each in seen[3].text] == ["user", "assistant", "system", "user"]
    assert counted(seen[5]) == {"rewritten": 3, "branches": 3}
    cut = await made.step("abc")
    assert cut.follows == 0, "the policy has said more than the agent has read"
    assert (await made.step("end")).done


async def test_requests_side_by_side_are_asked_one_after_the_other(agent: MakeAgent) -> None:
    source = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(3) as threads:
    found = list(threads.map(lambda n: ask(user(str(n)))["content"], range(3)))
print(found)
"""
    made = agent(source)
    seen = await made.reset(ROW, 0)
    asked = [seen.text[0]["content"]]
    for _ in range(2):
        seen = await made.step(f"re {asked[-1]}")
        assert seen.follows == 0
        asked.append(seen.text[0]["content"])
    assert sorted(asked) == ["0", "1", "2"]
    assert (await made.step(f"re {asked[-1]}")).text[0]["content"] == "['re 0', 're 1', 're 2']\n"


async def test_a_request_that_is_sent_again_gets_the_same_answer(agent: MakeAgent, tmp_path: Path) -> None:
    """The first client goes away before the answer; the second one says that it asks again."""
    source = """
import http.client, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
body = json.dumps({"messages": [user("a")]})
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
gone = http.client.HTTPConnection(url.netloc)
gone.request("POST", url.path + "/chat/completions", body, headers)
gone.close()
open(sys.argv[1]).close()  # Until the endpoint knows.
first = post({"messages": [user("a")]})
again = post({"messages": [user("a")]}, **{"x-stainless-retry-count": "1"})
print(first == again)
print(post({"messages": [user("a")]})["choices"][0]["message"]["content"])
"""
    os.mkfifo(tmp_path / "goes on")
    made = agent(source, str(tmp_path / "goes on"))
    await made.reset(ROW, 0)
    await until(lambda: made._exchanges._pending.waiting == 0)
    await asyncio.to_thread((tmp_path / "goes on").write_text, "")
    other = await made.step("once")
    assert (other.follows, counted(other)) == (0, {"repeated": 2, "rewritten": 1})
    assert (await made.step("asked anew")).text[0]["content"] == "True\nasked anew\n"


async def test_tokens_and_logprobs_reach_the_agent(agent: MakeAgent) -> None:
    made = agent('print(json.dumps(post({"messages": [user("a")], "logprobs": True, "model": "m"})))')
    await made.reset(ROW, 0)
    sampled = SampledAnswer(("4", "2", "<eos>"), (-0.5, -0.25, -0.125), "length", 7)
    found = json.loads((await made.step("42", sampled)).text[0]["content"])
    choice = found["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "42", "refusal": None}
    assert [(each["token"], each["logprob"]) for each in choice["logprobs"]["content"]] == [
        ("4", -0.5),
        ("2", -0.25),
        ("<eos>", -0.125),
    ]
    assert (choice["finish_reason"], found["model"]) == ("length", "m")
    assert found["usage"] == {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10}


async def test_an_agent_that_asks_nothing_or_ends_badly_is_an_error(agent: MakeAgent) -> None:
    for source, why in (
        ("print('nothing to do')", "OPENAI_BASE_URL"),
        ("sys.exit('no key for it')", "1"),
        ("os.kill(os.getpid(), 9)", "signal 9"),
        ("for _ in range(20): post({})\nos.abort()", "signal 6"),
    ):
        with golden.raises(AgentFailed, match=why):
            await agent(source).reset(ROW, 0)
    for source in ("print('no number')", "raise KeyError('x')"):
        made = agent(f'ask(user("a"))\n{source}', reward="last_line")
        await made.reset(ROW, 0)
        with golden.raises(AgentFailed):
            await made.step("1")


async def test_output_is_bounded(agent: MakeAgent) -> None:
    made = agent('ask(user("a"))\nfor _ in range(200): print("x" * 10_000)\nprint(0.5)', reward="last_line")
    await made.reset(ROW, 0)
    last = await made.step("1")
    assert (last.reward, len(last.text[0]["content"])) == (0.5, 16 * 2**10)


CHILDREN = """
import subprocess, time
sleeping = [subprocess.Popen(["sleep", "600"]), subprocess.Popen(["sleep", "600"], start_new_session=True)]
with open(sys.argv[1], "w") as file:
    file.write(" ".join(str(each.pid) for each in sleeping))
ask(user("a"))
time.sleep(600)
"""


async def test_all_that_an_agent_started_ends_with_its_episode(agent: MakeAgent, tmp_path: Path) -> None:
    made = agent(CHILDREN, str(tmp_path / "pids"))
    await made.reset(ROW, 0)
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    assert all(map(alive, pids))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(made.step("1"), 0.2)
    golden.says(made.waits_for)
    await made.close()
    assert not any(map(alive, pids))


async def test_the_program_knows_its_key_and_no_proxy_comes_between(
    agent: MakeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("OPENAI_API_KEY", "of the person")
    source = 'ask(user(os.environ["WORD"] + str(os.environ["OPENAI_API_KEY"] == "of the person")))'
    made = agent(source, variables={"WORD": "x"})
    assert (await made.reset(ROW, 0)).text[0]["content"] == "xFalse"


@pytest.mark.parametrize(
    ("use", "options"),
    [
        ("agent:", {}),
        ("agent:nosuchprogram x", {}),
        ("agent:sh", {"reward": "lastline"}),
        ("agent:sh", {"form": "hermess"}),
    ],
)
def test_wrong_options_are_refused(use: str, options: dict[str, Any]) -> None:
    with golden.raises(ConfigError):
        load(EnvironmentSpec(use, options))()


async def test_an_agent_that_was_never_begun_closes() -> None:
    made = Agent("python agent.py")
    assert made._words == [sys.executable, "agent.py"]
    await made.close()
