"""Tokenization: what tokenizer and chat template write around texts, prompts (text, or messages), the turns of
episodes, completions with their stop strings, and the ids that end an answer."""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray

from asyncrl.config.sections.task_config import CLOCK
from asyncrl.engines.models.model_folder import GENERATION, chat_template_of, vocabulary
from asyncrl.engines.models.prompt_pictures import NO_PICTURES, PictureProcessor, PromptPictures
from asyncrl.environments.transcript import begun_context, without_info
from asyncrl.errors import TaskError
from asyncrl.protocols.answer_text import PAIRS, ends_in_thoughts, split_thoughts
from asyncrl.protocols.batch import Columns
from asyncrl.tasks.chat_messages import MARK, in_parts, refuse_unseen_functions, takes_parts
from asyncrl.tasks.pictures import has_pictures, picture_files
from asyncrl.tasks.turn_template import BEFORE_ANSWER, INSIDE_ANSWER, WHOLE, Tools, TurnTemplate

# Reads what tokenizer and chat template of a model write around texts and answers.


ANSWER = "fifteen"
CONVERSATION = ({"role": "user", "content": "What is seven plus eight?"}, {"role": "assistant", "content": ANSWER})

WITH_CLOCK = (
    "{%- macro strftime_now(format) -%}{%- set now = namespace(begun='') -%}{%- for each in format -%}"
    "{%- if now.begun and each != '-' -%}{{- CLOCK.get(now.begun ~ each, each) -}}{%- set now.begun = '' -%}"
    "{%- elif now.begun or each == '%' -%}{%- set now.begun = now.begun ~ each -%}{%- else -%}{{- each -}}{%- endif -%}"
    "{%- endfor -%}{%- endmacro %}\n"
).replace("CLOCK", CLOCK)
"""Reads the clock from an argument of the template: transformers gives templates plain values only, and no functions
but its own."""


def with_clock(template: str) -> str:
    """Returns a chat template that reads the clock of `TaskConfig.template_clock` where it asks for today's date."""
    return f"{WITH_CLOCK}{template}" if "strftime_now" in template else template


@dataclass(frozen=True, slots=True)
class Marks:
    """Tells which tokens of a tokenizer stand for no text. template: of chats; "" without one. ids: of
    added tokens by text. special: those that skip_special_tokens leaves out. names: texts by the name that templates
    know them by, such as eos_token; None where a file says that there is none."""

    template: str
    ids: Mapping[str, int]
    special: frozenset[str]
    names: Mapping[str, str | None]

    @classmethod
    def of_folder(cls, folder: Path) -> "Marks":
        read = {
            name: json_object(folder / f"{name}.json")
            for name in ("special_tokens_map", "tokenizer_config", "tokenizer")
        }
        decoder = read["tokenizer_config"].get("added_tokens_decoder") or {}
        added = [{"id": number, **each} for number, each in decoder.items()] + (
            read["tokenizer"].get("added_tokens") or []
        )
        known = {**read["special_tokens_map"], **read["tokenizer_config"]}
        named = {key: value for key, value in known.items() if key.endswith("_token")}
        names = {key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()}
        return cls(
            chat_template_of(folder) or "",
            {each["content"]: int(each["id"]) for each in added},
            frozenset(each["content"] for each in added if each.get("special")),
            {key: value for key, value in names.items() if value is None or isinstance(value, str)},
        )

    @classmethod
    def of_tokenizer(cls, tokenizer: Any) -> "Marks":
        template = getattr(tokenizer, "chat_template", None)
        added = {each.content: (number, each.special) for number, each in tokenizer.added_tokens_decoder.items()}
        names = {key: str(value) for key, value in tokenizer.special_tokens_map.items() if not isinstance(value, list)}
        special = frozenset(text for text, (_, is_special) in added.items() if is_special)
        ids = {text: number for text, (number, _) in added.items()}
        return cls(template if isinstance(template, str) else "", ids, special, names)

    def rendered(self) -> str:
        """Returns a question with its answer as the template writes them; "" where it does not write such."""
        if not self.template:
            return ""
        from transformers.utils.chat_template_utils import render_jinja_template

        names = {key: value for key, value in self.names.items() if value is not None}
        try:
            (text,), _ = render_jinja_template([list(CONVERSATION)], chat_template=self.template, **names)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return ""
        return str(text)

    def turn_end(self) -> str:
        """Returns the special token that the template closes an answer with; "" where it closes it with none, or with
        several."""
        after = self.rendered().partition(ANSWER)[2].lstrip()
        return max((text for text in self.special if text and after.startswith(text)), key=len, default="")


def configs_in(described: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Returns a config, and that of the text model in it."""
    return [described, described.get("text_config") or {}]


def named_ends(folder: Path, marks: Marks) -> set[int]:
    """Returns the ids that configs and tokenizer of a folder name as ends of an answer."""
    described = folder / GENERATION
    configs = configs_in(json_object(described if described.is_file() else folder / "config.json"))
    named: Any = next((each["eos_token_id"] for each in configs if each.get("eos_token_id") is not None), [])
    known = {text: at for at, text in vocabulary(folder).items()} | dict(marks.ids)
    by_name = known.get(marks.names.get("eos_token") or "")
    return {at for at in [*(named if isinstance(named, list) else [named]), by_name] if at is not None}


def write_ends(folder: Path) -> None:
    """Names all tokens at which a run ends answers in the generation config of a folder, as `end_ids` finds them, so
    that programs which serve the model end answers there too."""
    marks = Marks.of_folder(folder)
    path = folder / GENERATION
    shape = json_object(folder / "config.json")
    ends = named_ends(folder, marks) | {marks.ids[end] for end in [marks.turn_end()] if end}
    written = json_object(path)
    before = written.get("eos_token_id")
    if ends <= {*(before if isinstance(before, list) else [before])}:
        return
    kept = written or {key: shape[key] for key in ("bos_token_id", "pad_token_id") if key in shape}
    path.unlink(missing_ok=True)  # The copy of a file that may only be read cannot be written to.
    path.write_text(json.dumps(kept | {"eos_token_id": sorted(ends)}, indent=2) + "\n")


def json_object(path: Path) -> dict[str, Any]:
    """Returns the object in a file; an empty one where there is none, or a damaged one, which `damages` tells."""
    with suppress(OSError, ValueError):
        if isinstance(found := json.loads(path.read_bytes()), dict):
            return found
    return {}


WINDOW_MARGIN = 8  # extra tokens in the search window, for what a tokenizer strips at its edge
BYTES_PER_CHARACTER = 4  # longest UTF-8 character; a byte-level token may be a single byte
INVALID = "\ufffd"  # stands for bytes that are no whole character
TAIL = 64  # tokens at the end of a prompt that hold the mark which opens thoughts, whatever the tokenizer
EXCERPT = 60  # longest quote of a message in an error, in characters
# Around quoted text: Unicode assigns no character to these.
OPEN = "\ufdd0"
CLOSE = "\ufdd1"
QUOTED = re.compile(f"{OPEN}([^{OPEN}{CLOSE}]*){CLOSE}")
WORD = re.compile(r"\S+")
WORD_OR_TAG = re.compile(r"<[^<>]*>|[^<>\s]+")
NO_THOUGHTS = re.compile("|".join(rf"{re.escape(begin)}\s*{re.escape(end)}\s*\Z" for begin, end in PAIRS))
OPENED = re.compile("|".join(rf"{re.escape(begin)}\s*\Z" for begin, _ in PAIRS))
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # keys of a message that few templates know

Message = dict[str, Any]
Places = tuple[tuple[int, str, int], ...]  # numbers of messages, keys, and indices in lists of parts
NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})
ASSISTANT = "assistant"
NO_TEMPLATE = (
    "the prompt is a list of messages and the model's tokenizer has no chat template: write the prompts as text, "
    "without task.system, or use a model with a chat template (most -Instruct models have one)"
)
ENDED = (
    "the model's tokenizer writes {} behind each text, so that a prompt would have ended before its answer: write "
    "add_eos_token = false in its tokenizer_config.json, or take it out of the post_processor in its tokenizer.json"
)


class TokenizerWithStops:
    """Wraps a tokenizer of transformers with the strings that end a completion. template: further arguments of the chat
    template. pictures: the image processor of a model that reads pictures."""

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...],
        template: Mapping[str, Any] = NO_ARGUMENTS,
        pictures: PictureProcessor | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._pictures = pictures
        self._template = dict(template)
        self._stop = stop
        self._window = BYTES_PER_CHARACTER * max(map(len, stop), default=0) + WINDOW_MARGIN
        self._may_end = cache(self._finds_an_end)  # bounded by the vocabulary

    def longest_token_bytes(self) -> int:
        """Returns the most UTF-8 bytes that one token can decode to: an invalid byte decodes to three (U+FFFD), and
        some decoders put a space between words."""
        return 1 + max(3, *(len(token.encode()) for token in self._tokenizer.get_vocab()))

    def prompt_ids(
        self, prompt: str | list[Message], tools: Sequence[dict[str, Any]] = (), *, by_environment: bool = False
    ) -> NDArray[np.int32]:
        """Returns the token ids of a prompt: text is tokenized with special tokens, of which those that it begins with
        are not written twice, messages by the chat template, which writes its first token. A last message of the
        assistant is an answer that goes on. tools: JSON schemas of functions, for the template. by_environment: an
        environment says the prompt, in which special tokens are text, and offers the tools, which it may describe in
        messages where the template does not show them. Raises
        TaskError when there is no template, it fails, or it changes or omits a part, and for a tokenizer that ends
        texts."""
        return self.prompt_and_pictures(prompt, tools, by_environment=by_environment)[0]

    def prompt_and_pictures(
        self, prompt: str | list[Message], tools: Sequence[dict[str, Any]] = (), *, by_environment: bool = False
    ) -> tuple[NDArray[np.int32], PromptPictures | None]:
        """Returns what `prompt_ids` does, in which each picture has its tokens, and the pictures. Raises TaskError as
        `prompt_ids`, and for a picture that the model does not read, or that cannot be decoded."""
        if not has_pictures(prompt):
            return self._text_prompt_ids(prompt, tools, by_environment), None
        if self._pictures is None or by_environment:
            raise TaskError(NO_PICTURES if self._pictures is None else "an environment begins without pictures")
        pictures = self._pictures.pictures(picture_files(prompt))
        return self._pictures.with_tokens(self._text_prompt_ids(prompt, tools, by_environment), pictures)

    def picture_columns(self, tokens: int) -> Columns:
        """Returns what the row of the pictures of a prompt of so many tokens takes at most; nothing for a model that
        reads none."""
        return {} if self._pictures is None else self._pictures.columns(tokens)

    def _text_prompt_ids(
        self, prompt: str | list[Message], tools: Sequence[dict[str, Any]], by_environment: bool
    ) -> NDArray[np.int32]:
        if isinstance(prompt, str):
            before, after = self._around
            if after:
                raise TaskError(ENDED.format(self.decode(np.array(after, np.int32), skip_special_tokens=False)))
            if by_environment and self.special_in(prompt):
                said = prompt.removeprefix(self.decode(np.array(before, np.int32), skip_special_tokens=False))
                return np.concatenate([np.asarray(before, np.int32), self.said_ids(said)])
            ids = self._tokenizer(prompt)["input_ids"]
            is_begun = bool(before) and ids[len(before) : 2 * len(before)] == before  # By a template, beforehand.
            return np.asarray(ids[len(before) :] if is_begun else ids, np.int32)
        is_begun = prompt[-1]["role"] == ASSISTANT
        prompt = [self.quoted_opening(message) for message in prompt] if by_environment else prompt
        text = self.render_chat(prompt, tools, WHOLE if is_begun else BEFORE_ANSWER)
        self.refuse_changed_parts(prompt, tools, text)
        if not by_environment:
            refuse_unseen_functions(prompt, tools, lambda said, offered: self.render_chat(said, offered, WHOLE))
        return self.rendered_ids(self._begun(prompt, tools) if is_begun else text)

    def _begun(self, prompt: Sequence[Message], tools: Sequence[dict[str, Any]]) -> str:
        """Returns the prompt up to the end of the answer in its last message, with the white space there, which some
        templates strip. Raises TaskError where the template changes the answer."""
        if prompt[-1].get("tool_calls"):
            raise TaskError("the last message calls tools, and no answer goes on there: write their results behind it")
        text = self.render_chat(prompt, tools, INSIDE_ANSWER)
        content = prompt[-1]["content"]
        answer = content if isinstance(content, str) else content[-1].get("text", "")
        head = answer.rstrip()
        shown = text.rstrip()
        if not shown.endswith(head):
            raise TaskError(
                f"the model's chat template changes the answer that is begun in the last message, {_excerpt(answer)}: "
                "write it as the template shows it, or the prompt as text"
            )
        before = shown.removesuffix(head)
        opening = self.render_chat(prompt[:-1], tools, BEFORE_ANSWER) if NO_THOUGHTS.search(before) else ""
        begins = answer.lstrip().startswith(tuple(begin for begin, _ in PAIRS))
        if not opening or (opening.rstrip() == before.rstrip() and not begins):
            return before + answer if head else opening or text
        if not head or (begins and not NO_THOUGHTS.search(opening)):
            return (OPENED.sub("", opening) if begins else opening) + answer
        raise TaskError(
            "the model's chat template puts empty thoughts, which the row does not have, before the answer that is "
            f"begun in the last message, {_excerpt(answer)}: write the thoughts into it, switch the thoughts of the "
            "template off where the answer has none, or write the prompt as text"
        )

    def refuse_changed_parts(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]], text: str, but: str = ""
    ) -> None:
        """Refuses a template that drops a part of a prompt, such as the thoughts of earlier answers, or puts empty ones
        before them. Each part has a mark in a second rendering, as its text may stand elsewhere; one in another form,
        such as JSON, shows marks that are put between its words. but: a role that may be changed."""
        parts = _parts(messages, but)
        marked = {places: _with_mark(part, number) for number, (places, part) in enumerate(parts.items())}
        is_plain = len(parts) == 1 and not tools and all(text.count(part.strip()) == 1 for part in parts.values())
        again = text if is_plain else self.render_chat(_with_parts(messages, marked), tools, WHOLE)
        for places, part in parts.items():
            (number, key, _), *_ = places
            role = messages[number]["role"]
            in_marked = part.strip() if is_plain else marked[places].strip()
            is_shown = part.strip() in text and in_marked in again
            if is_shown and role == ASSISTANT and key == "content" and number + 1 < len(messages):
                is_shown = not (split_thoughts(part)[0] and NO_THOUGHTS.search(again.partition(in_marked)[0]))
            elif not is_shown:
                worded = self.render_chat(_with_parts(messages, {places: _marked(part)}), tools, WHOLE)
                whole = self.render_chat(messages, tools, WHOLE)  # Of one that cuts texts, marks may be cut.
                is_shown = _shows_all(part, worded) or worded.count(part.strip()) < whole.count(part.strip())
            if not is_shown:
                raise TaskError(_changed(f"{number + 1} ({role})", key, part))

    @cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        """Returns the ids that the tokenizer writes before and after each text."""
        alone, whole = (list(self._tokenizer("a", add_special_tokens=each)["input_ids"]) for each in (False, True))
        at = next((at for at in range(len(whole)) if whole[at : at + len(alone)] == alone), 0)
        return whole[:at], whole[at + len(alone) :]

    def quoted_ids(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> NDArray[np.int32]:
        """Returns the token ids of messages by the chat template; what reads like a special token in them is text.
        Raises TaskError as `prompt_ids` does."""
        text = self.render_chat(self.quoted(messages), tools)
        self.refuse_changed_parts(self.quoted(messages), tools, text)
        return self.rendered_ids(text)

    def special_in(self, text: str) -> str:
        """Returns the first special token that a text has as text; "" where it has none."""
        found = self._special_text.search(text)
        return found[0] if found else ""

    def text_ids(self, text: str) -> NDArray[np.int32]:
        """Returns the token ids of a text alone, without special tokens."""
        return np.asarray(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def said_ids(self, text: str) -> NDArray[np.int32]:
        """Returns the token ids of a text of an environment, in which special tokens are text."""
        return self.rendered_ids(self.quoted(text))

    def rendered_ids(self, text: str) -> NDArray[np.int32]:
        """Returns the token ids of a rendered text, in which special tokens between quotes are text."""
        plain, *others = QUOTED.split(text)
        ids = [self.text_ids(plain)]
        for quoted, after in zip(others[::2], others[1::2], strict=True):
            settings = {"add_special_tokens": False, "split_special_tokens": True}
            ids += [np.asarray(self._tokenizer(quoted, **settings)["input_ids"], np.int32), self.text_ids(after)]
        return np.concatenate(ids)

    def quoted(self, value: Any) -> Any:
        """Returns a message, or a part of one, with quotes around all that reads like a special token."""
        if isinstance(value, str):
            text = value.replace(OPEN, "").replace(CLOSE, "")
            return self._special_text.sub(lambda found: f"{OPEN}{found[0]}{CLOSE}", text)
        if isinstance(value, Mapping):
            return {key: self.quoted(each) for key, each in value.items()}
        return [self.quoted(each) for each in value] if isinstance(value, list | tuple) else value

    def quoted_opening(self, message: Message) -> Message:
        """Returns a message with which an environment begins, quoted but for the marks of thoughts in an answer, which
        templates look for."""
        if message["role"] != ASSISTANT:
            return dict(self.quoted(message))
        marks = "|".join(re.escape(f"{OPEN}{mark}{CLOSE}") for pair in PAIRS for mark in pair)
        return {
            key: re.sub(marks, lambda found: found[0][1:-1], value) if isinstance(value, str) else value
            for key, value in self.quoted(message).items()
        }

    @property
    def _special_tokens(self) -> dict[int, Any]:
        added = self._tokenizer.added_tokens_decoder
        return {token: each for token, each in added.items() if each.special}

    @cached_property
    def _special_text(self) -> re.Pattern[str]:
        """Returns the pattern of special tokens, of which the longer one is found first; else one that finds none."""
        tokens = [token.content for token in self._special_tokens.values()]
        return re.compile("|".join(map(re.escape, sorted(filter(None, tokens), key=len, reverse=True))) or "(?!)")

    def render_chat(
        self,
        messages: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        end: Mapping[str, bool] = BEFORE_ANSWER,
    ) -> str:
        """Renders messages with the model's template, which is third-party code. end: what the text ends with; the
        template's mark for the start of an answer by default. Raises TaskError when there is no template or it
        fails."""
        if not self._tokenizer.chat_template:
            raise TaskError(NO_TEMPLATE)
        if self._takes_parts:
            messages = [in_parts(message) for message in messages]
        return self._render(messages, {**end, "tools": list(tools) or None})

    @cached_property
    def _takes_parts(self) -> bool:
        return takes_parts(lambda asked: self._render([asked], BEFORE_ANSWER))

    def _render(self, messages: Sequence[Message], settings: Mapping[str, Any]) -> str:
        try:
            own = {**self._template, **settings, "tokenize": False}
            if CLOCK in self._template:
                own["chat_template"] = with_clock(self._tokenizer.get_chat_template(None, settings.get("tools")))
            rendered = self._tokenizer.apply_chat_template([*map(_with_content, messages)], **own)
            return str(rendered)
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            if (with_texts := [*map(_with_text_arguments, messages)]) != list(messages):  # Some templates join texts.
                return self._render(with_texts, settings)
            raise TaskError(
                f"the model's chat template fails on this prompt: {type(error).__name__}: {error}; write messages that "
                "it takes, or the prompt as text"
            ) from error

    def is_special(self, token: int) -> bool:
        return token in self._tokenizer.all_special_ids

    def opens_thoughts(self, prompt: NDArray[np.int32], messages: str | Sequence[Message] = ()) -> bool:
        """Returns whether a prompt ends inside thoughts. messages: what it was rendered from, of which the last one may
        be an answer that goes on."""
        last = messages[-1] if messages and not isinstance(messages, str) else {}
        begun = last["content"] if last.get("role") == ASSISTANT else ""
        tail = self.decode(prompt[-TAIL:], skip_special_tokens=False)
        return ends_in_thoughts(tail, begun if isinstance(begun, str) else "")

    def decode(self, tokens: NDArray[np.int32], *, skip_special_tokens: bool = True) -> str:
        """Returns the text of tokens. skip_special_tokens: leaves out special ones, but for the marks of thoughts,
        which some tokenizers have among them."""
        ids = tokens.tolist()
        if skip_special_tokens and self._hidden is not None:
            ids = [token for token in ids if token not in self._hidden]
            skip_special_tokens = False
        settings = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self._tokenizer.decode(ids, **settings))

    @cached_property
    def _hidden(self) -> frozenset[int] | None:
        """Returns the special tokens that are no part of a mark of thoughts; None where no special token is one."""
        special = {token: each.content for token, each in self._special_tokens.items() if each.content}
        marks = {token for token, text in special.items() if any(text in mark for pair in PAIRS for mark in pair)}
        return frozenset(special.keys() - marks) if marks else None

    def stops(self, tokens: NDArray[np.int32]) -> bool:
        """Returns whether the newest token completes a stop string. Only a token that has the last character of one is
        decoded with those before it: with a window first, then with all."""
        if not self._stop or not len(tokens) or not self._may_end(int(tokens[-1])):
            return False
        return self._contains(tokens[-self._window :]) and self._contains(tokens)

    def before_stop(self, tokens: NDArray[np.int32]) -> str:
        """Returns the text before the first stop string, which may contain special tokens."""
        for text in (self.decode(tokens), self.decode(tokens, skip_special_tokens=False)):
            found = [text.index(stop) for stop in self._stop if stop in text]
            if found:
                return text[: min(found)]
        return self.decode(tokens)

    def _finds_an_end(self, token: int) -> bool:
        """Returns whether the last character of a stop string is in the text of a token, which is decoded twice in a
        row, because some decoders strip a space from the first token. Part of a character may become any character."""
        text = self.decode(np.array([token, token], np.int32), skip_special_tokens=False)
        return INVALID in text or any(stop[-1] in text for stop in self._stop)

    def _contains(self, tokens: NDArray[np.int32]) -> bool:
        text = self.decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in self._stop)


def end_ids(generation_config: Any, tokenizer: Any) -> NDArray[np.int64]:
    """Returns the end-of-sequence ids of the tokenizer and of the model's generation config, of which nothing else is
    read, because the experiment decides how to sample, and the token with which the chat template closes an answer."""
    named = [getattr(generation_config, "eos_token_id", None), tokenizer.eos_token_id]
    ids = {token for entry in named for token in (entry if isinstance(entry, list | tuple) else [entry])}
    if getattr(tokenizer, "chat_template", None) and (end := (marks := Marks.of_tokenizer(tokenizer)).turn_end()):
        ids.add(marks.ids[end])
    return np.array(sorted(ids - {None}), np.int64)


def _with_content(message: Message) -> Message:
    """Returns a message with an empty content in place of none: some templates would write "None", others fail."""
    return message if message.get("content", "") is not None else {**message, "content": ""}


def _with_text_arguments(value: Any) -> Any:
    """Returns a message whose calls have their arguments as JSON text."""
    if isinstance(value, list):
        return [_with_text_arguments(each) for each in value]
    if not isinstance(value, Mapping):
        return value
    changed = {"tool_calls": _with_text_arguments, "function": _with_text_arguments, "arguments": _json_of}
    return {key: changed[key](each) if key in changed else each for key, each in value.items()}


def _json_of(value: Any) -> Any:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parts(messages: Sequence[Message], but: str) -> dict[Places, str]:
    """Returns the texts in messages by where they stand. Fields of one message that have the same thoughts are one."""
    found: dict[tuple[int, int, str], Places] = {}
    for number, message in enumerate(messages):
        for key in ("content", *THOUGHTS) if message["role"] != but else ():
            given = message.get(key)
            for at, each in enumerate(given if isinstance(given, list) else [given]):
                part = each.get("text") if isinstance(each, dict) else each
                if isinstance(part, str) and part.strip():
                    own = number, at if key == "content" else -1, part
                    found[own] = (*found.get(own, ()), (number, key, at))
    return {places: part for (*_, part), places in found.items()}


def _with_parts(messages: Sequence[Message], parts: Mapping[Places, str]) -> list[Message]:
    """Returns messages with other texts in these places."""
    made = [*messages]
    for places, text in parts.items():
        for number, key, at in places:
            given: Any = made[number][key]
            listed: list[Any] = [*given] if isinstance(given, list) else [text]
            listed[at] = {**listed[at], "text": text} if isinstance(listed[at], dict) else text
            made[number] = {**made[number], key: listed if isinstance(given, list) else text}
    return made


def _with_mark(part: str, number: int) -> str:
    """Returns a text with a mark behind its last word that is no tag: templates look at the tags at its ends."""
    ends = [word.end() for word in WORD_OR_TAG.finditer(part) if not word[0].startswith("<")]
    at = ends[-1] if ends else len(part.rstrip())
    return f"{part[:at]}{MARK}{number}z{part[at:]}"


def _marked(part: str) -> str:
    """Returns a text with a numbered mark behind each of its words."""
    numbers = count()
    return WORD.sub(lambda word: f"{word[0]} {MARK}{next(numbers)}z ", part)


def _shows_all(part: str, text: str) -> bool:
    """Returns whether a rendered text has all marks of a part, and before each the letters and digits of its word."""
    at = 0
    for number, word in enumerate(WORD.findall(part)):
        end = text.find(f"{MARK}{number}z", at)
        before = iter(text[at : max(end, at)])
        if end < 0 or not all(letter in before for letter in word if letter.isascii() and letter.isalnum()):
            return False
        at = end
    return True


def _excerpt(part: str) -> str:
    return repr(part if len(part) <= EXCERPT else part[:EXCERPT] + "...")


def _changed(number: str, key: str, part: str) -> str:
    own = "" if key == "content" else f", its {key}"
    advice = "write the message as the template shows it"
    if own:
        advice = f"remove {key} from the row, or take a model whose template shows it"
    elif split_thoughts(part)[0]:
        advice += " (without <think> parts where it drops them)"
    return (
        f"the model's chat template leaves out or changes a part of message {number}{own}, {_excerpt(part)}: the "
        f"model would see another history than the row has; {advice}, or the prompt as text"
    )


# Renders the turns of an episode, token in, token out: what was sampled is never tokenized again.
#
#     prompt | sampled, turn 1 | given | sampled, turn 2 | given | ...
#
# Given tokens are what the chat template writes after an answer, up to its next mark for the start of an answer: the
# end of the turn, the environment's messages, and that mark (tasks/turn_template.py). A prompt that is text has no
# template, and the environment's text is tokenized as it is. What reads like a special token in an opening, in
# messages or in text stays text. `environment.thoughts = "template"` renders the conversation anew, and where it is
# not what the policy saw, a new context begins.


Ids = NDArray[np.int32]
LONGEST_OPENING = 32  # tokens at the end of a context among which a template opens thoughts


class TurnRenderer:
    """Renders prompts and what an environment answers. ends: ids that end an answer."""

    def __init__(self, tokenizer: TokenizerWithStops, ends: NDArray[np.int64]) -> None:
        self._tokenizer = tokenizer
        self._ends = frozenset(ends.tolist())
        self._template = TurnTemplate(tokenizer.render_chat)

    def prompt_ids(self, prompt: str | list[Message], tools: Tools = (), role: str = "") -> Ids:
        """Returns the ids of an opening. Raises TaskError when it cannot be rendered, or when it is a chat that no
        environment can answer with this template. role: in which the environment will answer; "": that is not known."""
        if not isinstance(prompt, str):
            self._template.refuse_role(role or ("tool" if tools else ""))
        return self._tokenizer.prompt_ids(prompt, tools, by_environment=True)

    def context_ids(self, messages: Sequence[Message], tools: Tools = ()) -> Ids:
        """Returns the ids of a conversation with which an environment begins a new context. Special tokens in it stay
        text, as in all that an environment says. Raises TaskError when it cannot be rendered as it is."""
        return self._tokenizer.quoted_ids(messages, tools)

    def given_ids(self, answer: Ids, messages: Sequence[Message], *, chat: bool, tools: Tools = ()) -> Ids:
        """Returns the tokens that follow the sampled ones of an answer when an environment says these messages.

        chat: whether the prompt is one. The end of the answer is given only where the answer lacks it. Raises TaskError
        for messages that the template cannot show.
        """
        if not chat:
            return self._tokenizer.said_ids("".join(str(message["content"]) for message in messages))
        self._template.refuse_unseen(messages)
        ids = self._tokenizer.rendered_ids(self._template.suffix(self.quoted(messages), tools))
        return ids[self._written(answer, ids) :]

    def context_as_written(
        self, seen: Sequence[Message], answer: Ids, said: Sequence[Message], now: Sequence[Message], tools: Tools
    ) -> Ids | None:
        """Returns the ids of the conversation `now` as the template writes it; None where it leaves what the policy saw
        and sampled as it was, so that `given_ids` of `said` go on there. seen: the conversation before the answer.
        Raises TaskError for messages that the template cannot show."""
        template = self._template
        whole = template.conversation(now, tools)
        if context := begun_context(said):
            self._tokenizer.refuse_changed_parts(self.quoted(context["messages"]), tools, whole, but=ASSISTANT)
            return self._tokenizer.rendered_ids(whole)
        template.refuse_unseen(said)
        kept = template.conversation(seen, tools) + self._text_of(answer) + template.suffix(self.quoted(said), tools)
        return None if whole == kept else self._tokenizer.rendered_ids(whole)

    def answer_message(self, context: Ids, answer: Ids) -> Message:
        """Returns the message that the template is shown for an answer. context: what the policy saw before it."""
        before = self._tokenizer.decode(context[-LONGEST_OPENING:], skip_special_tokens=False)
        return self._template.answer(before, self._text_of(answer))

    def quoted(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages of an environment, which may repeat what the policy wrote: no part of them becomes a mark of
        the template."""
        return list(self._tokenizer.quoted(without_info(messages)))

    def quoted_opening(self, messages: Sequence[Message]) -> list[Message]:
        """Returns messages with which an episode begins, such as the whole first request of an agent: no part of them
        becomes a mark of the template."""
        return [self._tokenizer.quoted_opening(message) for message in messages]

    @cached_property
    def _end(self) -> list[int]:
        return [int(token) for token in self._tokenizer.rendered_ids(self._template.end)]

    def _text_of(self, answer: Ids) -> str:
        """Returns the text of an answer without the tokens that end it."""
        ends = self._ends.union(filter(self._tokenizer.is_special, self._end))
        while len(answer) and int(answer[-1]) in ends:
            answer = answer[:-1]
        return self._tokenizer.decode(answer, skip_special_tokens=False)

    def _written(self, answer: Ids, ids: Ids) -> int:
        """Returns how many of these ids, with which the template goes on after an answer, the answer ends with, or with
        others in their place."""
        if not len(answer) or not len(ids):
            return 0
        last = int(answer[-1])
        ends = {last, *self._ends} if last in self._ends else {last}
        place = next((place for place, token in enumerate(self._end) if token in ends), None)
        if place is not None:
            same = ids[: place + 1].tolist() == self._end[: place + 1]
            if same or (not place and self._tokenizer.is_special(int(ids[0]))):
                return place + 1
        return int(last == int(ids[0]) and self._tokenizer.is_special(last))
