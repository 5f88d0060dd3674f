"""Chat templates of the families that run here, and templates that are missing, fail or rewrite what they are given."""

from collections.abc import Mapping
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from asyncrl.config.sections.task_config import TaskConfig
from asyncrl.deploy.checks.run_prompts import _rendered
from asyncrl.engines.generation.tokenization import NO_ARGUMENTS, TokenizerWithStops
from asyncrl.errors import TaskError
from tests import golden

Messages = list[dict[str, Any]]
BOS = 1
SAYS = {"role": "system", "content": "be kind"}
ASKS = {"role": "user", "content": "hi there"}
ANSWERS = {"role": "assistant", "content": "hello"}
THINKS = {"role": "assistant", "content": "<think>they greet me</think>hello"}
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}"
# The shapes of four families: Llama writes its first token itself and trims; Qwen2 and SmolLM2 put a system message
# before those that have none; Qwen3 takes the thoughts out of answers that were given before the last question.
TEMPLATES = {
    "llama": (
        "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
    ),
    "qwen2": NO_SYSTEM + CHATML,
    "qwen3": CHATML.replace("m.content", "m.content.split('</think>')[-1] if m.role == 'assistant' else m.content"),
    "smollm2": NO_SYSTEM.replace("You help", "You are SmolLM") + CHATML,
}
CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
# Llama 3.1 to 3.3 write results of tools as JSON.
RESULTS_AS_JSON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.content | tojson }}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}"
)


# Traits of templates of reasoning models: thoughts of their own before answers that have none in a field, and roles
# that they do not know left out.
DEVELOPER_LEFT_OUT = CHATML.replace("in messages", "in messages if m.role != 'developer'")
EMPTY_THOUGHTS = CHATML.replace(
    "{{ m.content }}", "{{ '<think>\n\n</think>\n\n' if m.role == 'assistant' }}{{ m.content }}"
)
OPENS_THOUGHTS = EMPTY_THOUGHTS.replace("{% endif %}", "<think>\n{% endif %}")
NO_THINKING = EMPTY_THOUGHTS.replace("{% endif %}", "<think>\n\n</think>\n\n{% endif %}")
SIGNED = CHATML.replace(
    "{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name }} {% endfor %}"
)


@pytest.fixture(autouse=True)
def _first_token(tokenizer: PreTrainedTokenizerFast) -> None:
    """Puts <bos> before every text, as Llama's does: a template that writes its own would get a second."""
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    assert tokenizer("x")["input_ids"][0] == BOS


def shown(
    tokenizer: PreTrainedTokenizerFast,
    template: str | None,
    messages: Any,
    tools: Messages | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> str:
    tokenizer.chat_template = template
    return str(tokenizer.decode(TokenizerWithStops(tokenizer, (), arguments).prompt_ids(messages, tools or ())))


def says(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def begun(content: str) -> Messages:
    return [ASKS, says("assistant", content)]


@pytest.mark.trap("chat_template")
@pytest.mark.parametrize("family", list(TEMPLATES))
@pytest.mark.parametrize("messages", [[ASKS], [SAYS, ASKS], [SAYS, ASKS, ANSWERS, ASKS]], ids=len)
def test_the_prompt_is_the_template_with_its_generation_prompt_and_one_first_token(
    family: str, messages: Messages, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATES[family]
    found = TokenizerWithStops(tokenizer, ()).prompt_ids(messages).tolist()
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert found == expected["input_ids"]
    assert found.count(BOS) == (family == "llama")
    ending = "assistant<|end_header_id|>\n\n" if family == "llama" else "<|im_start|>assistant\n"
    assert tokenizer.decode(found).endswith(ending)


@pytest.mark.trap("chat_template")
def test_text_is_tokenized_as_the_tokenizer_does_and_messages_need_a_template(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = None
    assert TokenizerWithStops(tokenizer, ()).prompt_ids("hi").tolist() == tokenizer("hi")["input_ids"]
    with golden.raises(TaskError, match="no chat template"):
        shown(tokenizer, None, [ASKS])


def of_calls(written: str) -> str:
    """Returns a template that writes calls of functions `f`."""
    with_calls = f"{{% if m.tool_calls %}}{{% set f = m.tool_calls[0].function %}}{written}{{% else %}}"
    return CHATML.replace("{{ m.content }}", with_calls + "{{ m.content }}{% endif %}")


def with_thoughts(key: str) -> str:
    """Returns a template that knows thoughts under this key."""
    thoughts = f"{{% if m.{key} %}}<think>{{{{ m.{key} }}}}</think>{{% endif %}}"
    return CHATML.replace("{{ m.content }}", thoughts + "{{ m.content }}")


FIRST_PART = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
PARTS: list[Any] = [{"type": "text", "text": "first"}, {"type": "audio", "url": "x.wav"}]
KEYS = ("reasoning_content", "reasoning", "thinking")
TWICE = {**ANSWERS, "reasoning_content": "so", "thinking": "so"}
RESULT = says("tool", "3 C")
CALLED = "{{ m.tool_calls[0].function.name }}"
TAKEN: dict[str, tuple[str, Messages, str]] = {
    "keeps thoughts": (TEMPLATES["qwen2"], [ASKS, THINKS, ASKS], "<think>they greet me</think>hello"),
    "no thoughts": (TEMPLATES["qwen3"], [ASKS, ANSWERS, ASKS], "hello"),
    "trims": (TEMPLATES["llama"], [says("user", "  hi \n")], "hi"),
    "no content": (TEMPLATES["llama"], [ASKS, says("assistant", None), ASKS], "hi there"),
    "a part of another kind": (FIRST_PART, [says("user", PARTS)], "first"),
    **{key: (with_thoughts(key), [ASKS, {**ANSWERS, key: "so"}, ASKS], "<think>so</think>hello") for key in KEYS},
    "thoughts in two fields": (with_thoughts("thinking"), [ASKS, TWICE, ASKS], "\n<think>so</think>hello"),
    "in the other field": (with_thoughts("reasoning_content"), [ASKS, TWICE, ASKS], "\n<think>so</think>hello"),
    "calls as JSON": (
        of_calls("{{ m.content }}{{ f.name }}{{ f.arguments | tojson }}"),
        [ASKS, CALLS, RESULT],
        'assistant\nget{"city": "Rome"}<|im_end|>',
    ),
    "calls as text": (
        of_calls("{{ m.content }}{{ f.name + f.arguments }}"),
        [ASKS, CALLS, RESULT],
        'assistant\nget{"city": "Rome"}<|im_end|>',
    ),
    "adds to no content": (
        CHATML.replace("{{ m.content }}", "{{ m['content'] + '!' }}" + CALLED),
        [CALLS, {**ASKS, "tool_calls": [CALL]}],
        "assistant\n!get",
    ),
    "writes no content": (
        CHATML.replace("{{ m.content }}", "{{ m.content }}" + CALLED),
        [CALLS, {**ASKS, "tool_calls": [CALL]}],
        "assistant\nget",
    ),
    "several calls": (
        SIGNED,
        [ASKS, {**CALLS, "tool_calls": [CALL] * 3}, *(says("tool", each) for each in "abc")],
        "get get get",
    ),
    "no thoughts before": (EMPTY_THOUGHTS, [ASKS, ANSWERS, ASKS], "hello"),
}


@pytest.mark.trap("rewritten_history")
@pytest.mark.parametrize("case", TAKEN)
def test_what_a_template_writes_in_a_form_of_its_own_is_taken(case: str, tokenizer: PreTrainedTokenizerFast) -> None:
    template, messages, text = TAKEN[case]
    assert text in shown(tokenizer, template, messages)


MANY = [says("system", "Be Kind"), says("user", "something long"), ANSWERS]
THREE_CALLS = [ASKS, {**CALLS, "tool_calls": [CALL] * 3}, *(says("tool", each) for each in "abc")]
SCHEMA = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
NO_DEVELOPER = "I help." + DEVELOPER_LEFT_OUT
REFUSED: dict[str, tuple[str, Messages, str]] = {
    "drops thoughts": (TEMPLATES["qwen3"], [ASKS, THINKS, ASKS], "2 .assistant., '<think>they greet me</think>hello'"),
    "small letters": (CHATML.replace("m.content", "m.content | lower"), MANY, "part of message 1 "),
    "cut": (CHATML.replace("m.content", "m.content[:7]"), MANY, "part of message 2 "),
    "without the first": (CHATML.replace("for m in messages", "for m in messages[1:]"), MANY, "part of message 1 "),
    "only the last": ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", MANY, "part of message 1 "),
    "second part": (FIRST_PART, [says("user", [*PARTS, {"type": "text", "text": "second"}])], "'second'"),
    "cuts the answer": (
        CHATML.replace("m.content", "(m.content if m.role == 'user' else 'The')"),
        begun("The sum is"),
        "part of message 2 .assistant.",
    ),
    **{
        f"result {changed}": (
            RESULTS_AS_JSON.replace("m.content | tojson", changed),
            [ASKS, CALLS, says("tool", '3 "C"\nand windy')],
            "part of message 3 .tool.",
        )
        for changed in (
            "m.content[:8] | tojson",
            "m.content | upper | tojson",
            "m.content | replace('windy', '') | tojson",
            "m.content.split('\n')[0] | tojson",
            "m.content | length",
            "m.content | reverse | list | tojson",
        )
    },
    **{
        f"no {key}": (CHATML, [ASKS, {**ANSWERS, key: "they greet me"}, ASKS], f"2 .assistant., its {key}")
        for key in KEYS
    },
    **{
        f"begun {text!r}": (TEMPLATES["llama"], begun(text), "answer that is begun")
        for text in (" It is", "\tIt is \n")
    },
    "ends with a call": (RESULTS_AS_JSON, [ASKS, CALLS], "the last message calls tools"),
    **{
        f"developer {number}": (NO_DEVELOPER, messages, said)
        for number, (messages, said) in enumerate(
            [
                ([says("developer", "be brief"), says("user", "Please be brief.")], "1 .developer"),
                ([says("developer", "I"), ASKS], "1 .developer"),
                ([ASKS, {**ANSWERS, "reasoning_content": "hell"}, ASKS], "2 .assistant., its reasoning_content"),
                ([ASKS, {**ANSWERS, "thinking": "hi there"}, ASKS], "2 .assistant., its thinking"),
                ([says("developer", "hi there"), ASKS], "1 .developer"),
                ([says("developer", [{"type": "text", "text": "hi"}]), ASKS], "1 .developer"),
            ]
        )
    },
    **{
        f"calls{kept}": (
            SIGNED.replace("m.tool_calls or []", f"(m.tool_calls or []){kept}"),
            THREE_CALLS,
            "tool_calls, get",
        )
        for kept in ("[:1]", "[1:]", "[::2]")
    },
    **{
        f"begun {number}": (template, begun(text), "puts empty thoughts")
        for number, (template, text) in enumerate(
            [
                (EMPTY_THOUGHTS, "It is "),
                (OPENS_THOUGHTS, "It is"),
                (OPENS_THOUGHTS, "a"),
                (NO_THINKING, "<think>\nLet me"),
            ]
        )
    },
    **{
        f"empty thoughts before {answer!r}": (EMPTY_THOUGHTS, [*begun(answer), ASKS], "part of message 2 .assistant.")
        for answer in ("<think>R</think>A", "<think>\nR\n</think>\n\nA", "R</think>A", "<think>R")
    },
}


@pytest.mark.trap("rewritten_history")
@pytest.mark.parametrize("case", REFUSED)
def test_a_template_that_changes_or_leaves_out_a_part_is_refused(case: str, tokenizer: PreTrainedTokenizerFast) -> None:
    """Also where its text stands elsewhere."""
    template, messages, fact = REFUSED[case]
    with golden.raises(TaskError, match=fact):
        shown(tokenizer, template, messages)


def test_tools_that_the_template_leaves_out_are_missed(tokenizer: PreTrainedTokenizerFast) -> None:
    """Beside the schema of the function that is called, and beside a message with the name of a tool."""
    with golden.raises(TaskError, match="tool_calls, get"):
        shown(tokenizer, "{{ tools | tojson }}" + CHATML, [ASKS, CALLS, ASKS], [SCHEMA])
    with golden.raises(TaskError, match="tools, hi"):
        shown(tokenizer, CHATML, [ASKS], [{"name": "hi", "parameters": {}}])


@pytest.mark.trap("chat_template")
@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('no system here') }}", "fails on this prompt: TemplateError: no system here"),
        ("{% for m in messages %}{{ m.content", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_the_prompts_error(
    template: str, said: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with pytest.raises(TaskError, match=f"the model's chat template .*{said}"):
        shown(tokenizer, template, [SAYS, ASKS])


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_a_last_message_of_the_assistant_is_an_answer_that_goes_on(
    family: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    asked, found = (shown(tokenizer, TEMPLATES[family], messages) for messages in ([ASKS], begun("The sum is")))
    assert found == f"{asked}The sum is"


LLAMA_ANSWER = "assistant<|end_header_id|>\n\n"
ASKED = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("template", "head", "answer"),
    [
        *((TEMPLATES["llama"], LLAMA_ANSWER, answer) for answer in ("It is ", "It is\n", "It is")),
        *(
            (template, ASKED, answer)
            for template in (EMPTY_THOUGHTS, OPENS_THOUGHTS)
            for answer in ("<think>\nLet me", "<think>", "<think>\nso\n</think>\n\nIt is ")
        ),
        (NO_THINKING, f"{ASKED}<think>\n\n</think>\n\n", "It is "),
        (CHATML, ASKED, "It is "),
    ],
)
def test_an_answer_that_goes_on_keeps_its_white_space_and_has_what_the_template_writes_before_any(
    template: str, head: str, answer: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Thoughts that are begun have no empty ones before them."""
    assert shown(tokenizer, template, begun(answer)).endswith(head + answer)


def test_tools_and_further_arguments_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    head = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ 'thinks' if enable_thinking else 'answers' }} "
    for arguments, word in (({}, "answers"), ({"enable_thinking": True}, "thinks")):
        assert shown(tokenizer, head + CHATML, [ASKS], [{"name": "add"}], arguments).startswith(f"add {word} ")


@pytest.mark.parametrize(
    ("written", "date", "wanted"),
    [
        ("{{ strftime_now('%Y-%m-%d') }}", "2026-11-28", "2026-11-28"),
        ("{{ strftime_now('%d %b %Y') }}", "2024-02-29", "29 Feb 2024"),
        (
            "{% if strftime_now is defined %}{{ strftime_now('%B %d, %Y') }}{% else %}then{% endif %}",
            "2026-01-02",
            "Jan",
        ),
        ("{%- set today = strftime_now(format='%A') -%}{{ today }}", "2026-11-28", "Saturday"),
        ("{{ strftime_now('%Y-%m-%d %H:%M:%S') }}", "2026-11-28", "2026-11-28 00:00:00"),
        ("{{ strftime_now('%-d.%-m.%Y, 100%%') }}", "2026-11-08", "8.11.2026, 100%"),
        ("\n{% set f = '%F' %}{{ strftime_now(f) | upper }}", "2026-11-28", "\n2026-11-28"),
        ("{% macro head() %}{{ strftime_now('%y') }}{% endmacro %}{{ head() }}", "2026-11-28", "26"),
    ],
)
def test_templates_that_read_the_clock_are_given_the_date_of_the_run(
    tokenizer: PreTrainedTokenizerFast, written: str, date: str, wanted: str
) -> None:
    task = TaskConfig(prompts="p", date=date)
    assert shown(tokenizer, written + CHATML, [ASKS], arguments=task.template_arguments).startswith(wanted)
    assert len(_rendered([ASKS], tokenizer.chat_template, task.template_arguments).split(wanted)) == 2


@pytest.mark.parametrize("date", ["2026-13-01", "yesterday", "28.11.2026"])
def test_what_is_no_date_is_refused(date: str) -> None:
    with golden.raises(ValidationError, match=f"{date} is no date"):
        TaskConfig(prompts="p", date=date)


@pytest.mark.parametrize(
    "encoded", ["m.content | tojson", "m.content | e", "m.content | urlencode", "m.content | replace('\n', '\n> ')"]
)
def test_a_template_may_write_results_of_tools_in_another_form(
    encoded: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    template = RESULTS_AS_JSON.replace("m.content | tojson", encoded)
    for result in (
        '{"t": 3}',
        "3 C\nwindy",
        'a "quote" \\ and a tab\t.',
        "é <b>",
        "[1, 2]",
        "C:\\temp\nnew",
        "{'t': 3}",
    ):
        assert "get" in shown(tokenizer, template, [ASKS, CALLS, says("tool", result)]), result
