"""Chat templates of the families that run here, and templates that are missing, fail or rewrite what they are given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.config.sections.task_config import TaskConfig
from asyncrl.deploy.checks.run_prompts import _rendered
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.errors import TaskError

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


@pytest.fixture
def tokenizer(model_folder: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    """One that puts <bos> before every text, as Llama's does: a template that writes its own would get a second."""
    made = AutoTokenizer.from_pretrained(model_folder("llama"))
    made.backend_tokenizer.post_processor = TemplateProcessing("<bos> $A", special_tokens=[("<bos>", BOS)])
    assert made("x")["input_ids"][0] == BOS
    return made


@pytest.mark.trap("chat_template")
@pytest.mark.parametrize("family", list(TEMPLATES))
@pytest.mark.parametrize("messages", [[ASKS], [SAYS, ASKS], [SAYS, ASKS, ANSWERS, ASKS]], ids=len)
def test_the_prompt_is_the_template_with_its_generation_prompt_and_one_first_token(
    family: str, messages: list[dict[str, Any]], tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATES[family]
    found = TokenizerWithStops(tokenizer, ()).prompt_ids(messages).tolist()
    expected = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)
    assert found == expected["input_ids"]
    assert found.count(BOS) == (family == "llama")
    ending = "assistant<|end_header_id|>\n\n" if family == "llama" else "<|im_start|>assistant\n"
    assert tokenizer.decode(found).endswith(ending)


def test_text_is_tokenized_as_the_tokenizer_does(tokenizer: PreTrainedTokenizerFast) -> None:
    assert TokenizerWithStops(tokenizer, ()).prompt_ids("hi").tolist() == tokenizer("hi")["input_ids"]


@pytest.mark.trap("rewritten_history")
def test_a_template_that_drops_the_thoughts_of_an_earlier_answer_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = TEMPLATES["qwen3"]
    texts = TokenizerWithStops(tokenizer, ())
    says = r"leaves out or changes a part of message 2 \(assistant\), '<think>they greet me</think>hello'"
    with pytest.raises(TaskError, match=says):
        texts.prompt_ids([ASKS, THINKS, ASKS])
    assert len(texts.prompt_ids([ASKS, ANSWERS, ASKS]))
    tokenizer.chat_template = TEMPLATES["qwen2"]
    assert len(texts.prompt_ids([ASKS, THINKS, ASKS])), "one that keeps them is none"


@pytest.mark.trap("rewritten_history")
@pytest.mark.parametrize(
    ("template", "number"),
    [
        (CHATML.replace("m.content", "m.content | lower"), 1),
        (CHATML.replace("m.content", "m.content[:7]"), 2),
        (CHATML.replace("for m in messages", "for m in messages[1:]"), 1),
        ("{% for m in messages[-1:] %}{{ m.content }}{% endfor %}", 1),
    ],
    ids=["small letters", "cut", "without the first", "only the last"],
)
def test_a_template_that_changes_or_forgets_a_message_is_refused(
    template: str, number: int, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    messages = [{"role": "system", "content": "Be Kind"}, {"role": "user", "content": "something long"}, ANSWERS]
    with pytest.raises(TaskError, match=rf"changes a part of message {number} "):
        TokenizerWithStops(tokenizer, ()).prompt_ids(messages)


@pytest.mark.trap("rewritten_history")
def test_white_space_around_a_message_and_parts_of_other_kinds_are_no_history(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = TEMPLATES["llama"]
    texts = TokenizerWithStops(tokenizer, ())
    assert len(texts.prompt_ids([{"role": "user", "content": "  hi \n"}]))
    assert len(texts.prompt_ids([ASKS, {"role": "assistant", "content": None}, ASKS]))
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", "{{ m.content[0].text }}")
    parts = [{"type": "text", "text": "first"}, {"type": "audio", "url": "x.wav"}]
    assert len(texts.prompt_ids([{"role": "user", "content": parts}]))
    with pytest.raises(TaskError, match="'second'"):
        texts.prompt_ids([{"role": "user", "content": [*parts, {"type": "text", "text": "second"}]}])


@pytest.mark.trap("chat_template")
@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('no system here') }}", "fails on this prompt: TemplateError: no system here"),
        ("{% for m in messages %}{{ m.content", "TemplateSyntaxError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{{ messages[0].content + 3 }}", "TypeError"),
    ],
)
def test_a_template_that_fails_is_the_prompts_error(
    template: str, says: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TaskError, match=f"the model's chat template .*{says}"):
        TokenizerWithStops(tokenizer, ()).prompt_ids([SAYS, ASKS])


@pytest.mark.parametrize("family", list(TEMPLATES))
def test_a_last_message_of_the_assistant_is_an_answer_that_goes_on(
    family: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATES[family]
    texts = TokenizerWithStops(tokenizer, ())
    begun = {"role": "assistant", "content": "The sum is"}
    asked, found = (tokenizer.decode(texts.prompt_ids(messages)) for messages in ([ASKS], [ASKS, begun]))
    assert found == f"{asked}The sum is"


def test_an_answer_to_go_on_with_that_the_template_cuts_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("m.content", "(m.content if m.role == 'user' else 'The')")
    with pytest.raises(TaskError, match=r"leaves out or changes a part of message 2 \(assistant\)"):
        TokenizerWithStops(tokenizer, ()).prompt_ids([ASKS, {"role": "assistant", "content": "The sum is"}])


def test_tools_and_further_arguments_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    shown = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ 'thinks' if enable_thinking else 'answers' }} "
    tokenizer.chat_template = shown + CHATML
    for arguments, word in (({}, "answers"), ({"enable_thinking": True}, "thinks")):
        ids = TokenizerWithStops(tokenizer, (), arguments).prompt_ids([ASKS], [{"name": "add"}])
        assert tokenizer.decode(ids).startswith(f"add {word} ")


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
    tokenizer.chat_template = written + CHATML
    task = TaskConfig(prompts="p", date=date)
    ids = TokenizerWithStops(tokenizer, (), task.template_arguments).prompt_ids([ASKS])
    assert tokenizer.decode(ids).startswith(wanted)
    assert len(_rendered([ASKS], tokenizer.chat_template, task.template_arguments).split(wanted)) == 2


@pytest.mark.parametrize("date", ["2026-13-01", "yesterday", "28.11.2026"])
def test_what_is_no_date_is_refused(date: str) -> None:
    with pytest.raises(ValidationError, match=f"{date} is no date: write one such as"):
        TaskConfig(prompts="p", date=date)


CALL = {"type": "function", "function": {"name": "get", "arguments": {"city": "Rome"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [CALL]}
# Llama 3.1 to 3.3 write results of tools as JSON.
RESULTS_AS_JSON = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'tool' %}{{ m.content | tojson }}"
    "{% elif m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content }}{% endif %}<|im_end|>"
    "{% endfor %}"
)


def shown(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> str:
    return str(tokenizer.decode(TokenizerWithStops(tokenizer, ()).prompt_ids(messages)))


@pytest.mark.parametrize(
    "encoded", ["m.content | tojson", "m.content | e", "m.content | urlencode", "m.content | replace('\n', '\n> ')"]
)
@pytest.mark.parametrize(
    "result", ['{"t": 3}', "3 C\nwindy", 'a "quote" \\ and a tab\t.', "é <b>", "[1, 2]", "C:\\temp\nnew", "{'t': 3}"]
)
def test_a_template_may_write_results_of_tools_in_another_form(
    result: str, encoded: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = RESULTS_AS_JSON.replace("m.content | tojson", encoded)
    assert "get" in shown(tokenizer, [ASKS, CALLS, {"role": "tool", "content": result}])


@pytest.mark.parametrize(
    "changed",
    [
        "m.content[:8] | tojson",
        "m.content | upper | tojson",
        "m.content | replace('windy', '') | tojson",
        "m.content.split('\n')[0] | tojson",
        "m.content | length",
        "m.content | reverse | list | tojson",
    ],
)
def test_a_template_that_leaves_out_a_part_of_such_a_result_is_refused(
    changed: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = RESULTS_AS_JSON.replace("m.content | tojson", changed)
    with pytest.raises(TaskError, match=r"leaves out or changes a part of message 3 \(tool\)") as refused:
        shown(tokenizer, [ASKS, CALLS, {"role": "tool", "content": '3 "C"\nand windy'}])
    assert "<think>" not in str(refused.value)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_under_a_key_that_the_template_does_not_know_are_refused(
    key: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    messages = [ASKS, {**ANSWERS, key: "they greet me"}, ASKS]
    tokenizer.chat_template = CHATML
    with pytest.raises(
        TaskError, match=rf"changes a part of message 2 \(assistant\), its {key}, 'they greet me'.*remove {key} from"
    ):
        shown(tokenizer, messages)
    thoughts = f"{{% if m.{key} %}}<think>{{{{ m.{key} }}}}</think>{{% endif %}}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", thoughts + "{{ m.content }}")
    assert "<think>they greet me</think>hello" in shown(tokenizer, messages)


@pytest.mark.parametrize("begun", ["It is ", "It is\n", " It is", "\tIt is \n", "It is"])
def test_white_space_of_an_answer_that_goes_on_is_kept_or_refused(
    begun: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = TEMPLATES["llama"]
    messages = [ASKS, {"role": "assistant", "content": begun}]
    if begun[0].isspace():
        with pytest.raises(TaskError, match="changes the answer that is begun in the last message"):
            shown(tokenizer, messages)
    else:
        assert shown(tokenizer, messages).endswith(f"assistant<|end_header_id|>\n\n{begun}")


@pytest.mark.parametrize(
    ("written", "call"),
    [
        ("{{ m.content }}{{ f.name }}{{ f.arguments | tojson }}", 'get{"city": "Rome"}'),
        ("{{ m.content }}{{ f.name + f.arguments }}", 'get{"city": "Rome"}'),
    ],
)
def test_calls_are_written_as_the_template_takes_them(
    written: str, call: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    with_calls = f"{{% if m.tool_calls %}}{{% set f = m.tool_calls[0].function %}}{written}{{% else %}}"
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", with_calls + "{{ m.content }}{% endif %}")
    assert f"assistant\n{call}<|im_end|>" in shown(tokenizer, [ASKS, CALLS, {"role": "tool", "content": "3 C"}])


@pytest.mark.parametrize("content", ["{{ m['content'] + '!' }}", "{{ m.content }}"])
def test_a_call_without_content_is_written_without_any(content: str, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", content + "{{ m.tool_calls[0].function.name }}")
    found = shown(tokenizer, [CALLS, {**ASKS, "tool_calls": [CALL]}])
    assert f"assistant\n{'!' * (content != '{{ m.content }}')}get" in found


def test_a_call_that_the_template_leaves_out_is_missed_beside_the_schema_of_its_function(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    schema = {"type": "function", "function": {"name": "get", "parameters": {"type": "object"}}}
    tokenizer.chat_template = "{{ tools | tojson }}" + CHATML
    with pytest.raises(TaskError, match="leaves out tool_calls, get among them"):
        TokenizerWithStops(tokenizer, ()).prompt_ids([ASKS, CALLS, ASKS], [schema])


def test_a_prompt_that_ends_with_a_call_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = RESULTS_AS_JSON
    with pytest.raises(TaskError, match=r"the last message calls tools, .*: write their results behind it"):
        shown(tokenizer, [ASKS, CALLS])


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


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        (
            [{"role": "developer", "content": "be brief"}, {"role": "user", "content": "Please be brief."}],
            "1 .developer",
        ),
        ([{"role": "developer", "content": "I"}, ASKS], "1 .developer"),
        ([ASKS, {**ANSWERS, "reasoning_content": "hell"}, ASKS], "2 .assistant., its reasoning_content"),
        ([ASKS, {**ANSWERS, "thinking": "hi there"}, ASKS], "2 .assistant., its thinking"),
        ([{"role": "developer", "content": "hi there"}, ASKS], "1 .developer"),
        ([{"role": "developer", "content": [{"type": "text", "text": "hi"}]}, ASKS], "1 .developer"),
    ],
)
def test_a_part_that_is_left_out_is_missed_beside_another_with_its_text(
    messages: list[dict[str, Any]], says: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = "I help." + DEVELOPER_LEFT_OUT
    with pytest.raises(TaskError, match=f"leaves out or changes a part of message {says}"):
        shown(tokenizer, messages)


@pytest.mark.parametrize("key", ["reasoning_content", "thinking"])
def test_the_same_thoughts_in_two_fields_are_shown_by_one(key: str, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = CHATML.replace("{{ m.content }}", f"{{{{ m.{key} }}}}{{{{ m.content }}}}")
    messages = [ASKS, {**ANSWERS, "reasoning_content": "so", "thinking": "so"}, ASKS]
    assert "assistant\nsohello<|im_end|>" in shown(tokenizer, messages)


@pytest.mark.parametrize("kept", ["[:1]", "[1:]", "[::2]"])
def test_a_call_that_the_template_leaves_out_is_missed_beside_another_of_its_function(
    kept: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    results = [{"role": "tool", "content": each} for each in "abc"]
    messages = [ASKS, {**CALLS, "tool_calls": [CALL] * 3}, *results]
    tokenizer.chat_template = SIGNED
    assert "get get get" in shown(tokenizer, messages)
    tokenizer.chat_template = SIGNED.replace("m.tool_calls or []", f"(m.tool_calls or []){kept}")
    with pytest.raises(TaskError, match="leaves out tool_calls, get among them"):
        shown(tokenizer, messages)


def test_tools_that_the_template_leaves_out_are_missed_beside_a_message_with_their_name(
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    tokenizer.chat_template = CHATML
    with pytest.raises(TaskError, match="leaves out tools, hi among them"):
        TokenizerWithStops(tokenizer, ()).prompt_ids([ASKS], [{"name": "hi", "parameters": {}}])


@pytest.mark.parametrize("begun", ["<think>\nLet me", "<think>", "<think>\nso\n</think>\n\nIt is "])
@pytest.mark.parametrize("template", [EMPTY_THOUGHTS, OPENS_THOUGHTS])
def test_thoughts_that_are_begun_have_no_empty_ones_before_them(
    template: str, begun: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    found = shown(tokenizer, [ASKS, {"role": "assistant", "content": begun}])
    assert found == f"<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n{begun}"


@pytest.mark.parametrize(
    ("template", "begun"),
    [(EMPTY_THOUGHTS, "It is "), (OPENS_THOUGHTS, "It is"), (OPENS_THOUGHTS, "a"), (NO_THINKING, "<think>\nLet me")],
)
def test_empty_thoughts_before_an_answer_that_is_begun_are_refused(
    template: str, begun: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(TaskError, match="puts empty thoughts, which the row does not have, before the answer"):
        shown(tokenizer, [ASKS, {"role": "assistant", "content": begun}])


@pytest.mark.parametrize(("template", "head"), [(NO_THINKING, "<think>\n\n</think>\n\n"), (CHATML, "")])
def test_an_answer_goes_on_behind_what_the_template_writes_before_any(
    template: str, head: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = template
    found = shown(tokenizer, [ASKS, {"role": "assistant", "content": "It is "}])
    assert found.endswith(f"<|im_start|>assistant\n{head}It is ")


@pytest.mark.parametrize("answer", ["<think>R</think>A", "<think>\nR\n</think>\n\nA", "R</think>A", "<think>R"])
def test_empty_thoughts_before_those_of_an_earlier_answer_are_refused(
    answer: str, tokenizer: PreTrainedTokenizerFast
) -> None:
    tokenizer.chat_template = EMPTY_THOUGHTS
    with pytest.raises(TaskError, match=r"leaves out or changes a part of message 2 \(assistant\)"):
        shown(tokenizer, [ASKS, {"role": "assistant", "content": answer}, ASKS])
    assert shown(tokenizer, [ASKS, ANSWERS, ASKS])
