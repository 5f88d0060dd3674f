"""Chat templates of the families that run here, and templates that are missing, fail or rewrite what they are given."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer, PreTrainedTokenizerFast

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
    texts, begun = TokenizerWithStops(tokenizer, ()), {"role": "assistant", "content": "The sum is"}
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
