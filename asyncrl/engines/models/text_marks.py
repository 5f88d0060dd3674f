"""Reads what tokenizer and chat template of a model write around texts and answers."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from asyncrl.config.sections.task_config import CLOCK
from asyncrl.engines.models.model_folder import GENERATION, chat_template_of, vocabulary

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
