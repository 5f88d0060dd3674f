"""Messages and tools of rows, and texts that become messages."""

import json
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import Prompts, load_prompts, training_prompts

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ASKS = {"role": "user", "content": "1 + 1?"}


def prompt(content: Any, **more: Any) -> Any:
    return Prompts([{"prompt": [{"role": "user", "content": content, **more}]}], "p").row(0).prompt


def test_parts_that_are_texts_become_one_text() -> None:
    parts = [{"type": "text", "text": "What is "}, "1 + ", {"text": "1?"}]
    assert prompt(parts) == [{"role": "user", "content": "What is 1 + 1?"}]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": "x"}],
            "a part of its content is image_url",
        ),
        ([{"type": "text", "text": 3}], "a part of its content is text: "),
        ([3], "a part of its content is int: 3"),
        (3, "its content is 3, and a model reads text"),
        ({"text": "a"}, r"its content is \{'text': 'a'\}, and"),
    ],
)
def test_content_that_is_no_text_is_refused(content: Any, said: str) -> None:
    with pytest.raises(TaskError, match=rf"^p, row 1: message 1 \(user\): {said}"):
        prompt(content)


def test_an_answer_that_calls_tools_needs_no_text() -> None:
    calls = [{"type": "function", "function": {"name": "add", "arguments": {}}}]
    messages = [ASKS, {"role": "assistant", "content": None, "tool_calls": calls}]
    assert Prompts([{"prompt": messages}], "p").row(0).prompt == messages
    with pytest.raises(TaskError, match=r"message 2 \(assistant\): its content is None"):
        Prompts([{"prompt": [ASKS, {"role": "assistant", "content": None}]}], "p")


@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])])
def test_tools_of_a_row_are_a_list_or_a_text_of_one(tools: Any) -> None:
    assert Prompts([{"prompt": [ASKS], "tools": tools}], "p").row(0).columns["tools"] == [ADD]


@pytest.mark.parametrize("tools", ["hammer", {"name": "add"}, ["add"], "[3]"])
def test_other_columns_of_that_name_are_refused_or_left_out(tools: Any) -> None:
    rows = [{"prompt": [ASKS], "tools": tools}]
    with pytest.raises(
        TaskError, match=r'row 1: the column tools is no list of JSON schemas .*columns = \{ tools = "" '
    ):
        Prompts(rows, "p")
    assert "tools" not in load_prompts(rows, columns={"tools": ""}).row(0).columns


def test_tools_need_a_chat() -> None:
    rows = [{"prompt": "1 + 1?", "tools": [ADD]}]
    with pytest.raises(TaskError, match=r'its prompt is a text: write task\.text_prompts = "chat"'):
        load_prompts(rows)
    assert load_prompts(rows, chat=True).row(0).prompt == [ASKS]


def test_texts_become_messages_where_the_config_says_so() -> None:
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p", "text_prompts": "chat"}})
    assert training_prompts(config, [{"prompt": "1 + 1?"}]).row(0).prompt == [ASKS]
    assert training_prompts(config, [{"prompt": [ASKS]}]).row(0).prompt == [ASKS]


def test_arguments_that_asyncrl_gives_the_template_are_refused() -> None:
    with pytest.raises(ConfigError, match="asyncrl gives the chat template its tools: remove it here"):
        load(None, ["--model.name", "m", "--task.prompts", "p", "--task.chat_template_kwargs", "{ tools = [] }"], {})
