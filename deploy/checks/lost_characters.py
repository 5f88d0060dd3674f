"""Finds characters of prompts and answers that a tokenizer has no token for, so that the model never sees them."""

import json
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from asyncrl.tasks.chat_messages import Messages
from asyncrl.tasks.prompt_lengths import LOOKED_AT
from asyncrl.tasks.prompt_rows import PromptRows

ANSWER = "answer"
SHOWN = 20
"""Characters that a line names."""


def lost_characters(model: Path, sources: Mapping[str, PromptRows]) -> Iterator[str]:
    """Yields a line for each source with characters that are lost when the tokenizer of a model folder encodes and
    decodes them. sources: by config key. Of a large one, LOOKED_AT rows that are evenly spread are looked at."""
    file = model / "tokenizer.json"
    if not file.is_file() or _takes_bytes(described := file.read_text(encoding="utf-8")):
        return
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_str(described)
    for key, prompts in sources.items():
        first = _first_rows(prompts)
        lost = [character for character in sorted(first) if not _is_kept(tokenizer, character)]
        if lost:
            named = ", ".join(json.dumps(each, ensure_ascii=False) for each in lost[:SHOWN])
            more = f" and {len(lost) - SHOWN} others" if len(lost) > SHOWN else ""
            yield (
                f"{key}: the tokenizer of the model has no token for {named}{more}, and the model reads texts without "
                f"them, first in {prompts.where(min(first[each] for each in lost))}: write the texts with other "
                "characters, or take another model"
            )


def _takes_bytes(described: str) -> bool:
    """Returns whether a tokenizer makes tokens of bytes where it knows no character."""
    found = json.loads(described)
    return bool((found.get("model") or {}).get("byte_fallback")) or '"ByteLevel"' in json.dumps(
        [found.get("pre_tokenizer"), found.get("decoder")]
    )


def _first_rows(prompts: PromptRows) -> dict[str, int]:
    """Returns the characters of prompts and answers, each with the number of a row that has it."""
    number = min(len(prompts), LOOKED_AT)
    found = dict[str, int]()
    for place in range(number):
        row = place * len(prompts) // number
        prompt, columns = prompts.row(row)
        answer = columns.get(ANSWER)
        for character in {*_text(prompt), *(answer if isinstance(answer, str) else "")}:
            found.setdefault(character, row)
    return found


def _text(prompt: Messages) -> str:
    return prompt if isinstance(prompt, str) else "".join(str(message["content"]) for message in prompt)


def _is_kept(tokenizer: Any, character: str) -> bool:
    """Returns whether a character is there after encoding and decoding; another form of it counts, and so does the
    small letter of a capital one."""
    ids = tokenizer.encode(f"a{character}a", add_special_tokens=False).ids
    decoded = unicodedata.normalize("NFKD", tokenizer.decode(ids, skip_special_tokens=True)).casefold()
    return set(unicodedata.normalize("NFKD", character).casefold()) <= set(decoded)
