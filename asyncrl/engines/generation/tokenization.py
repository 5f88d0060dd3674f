"""Between text and tokens: prompts, completions, stop strings, end-of-sequence ids."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from asyncrl.engines.generation.rendering import rendered

WINDOW_MARGIN = 8  # tokens more than a stop string can need, for what a tokenizer strips at the window's edge
BYTES_PER_CHARACTER = 4  # of UTF-8: a byte-level token may be one byte


class Texts:
    """A tokenizer with the stop strings of a run.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end a completion.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...]) -> None:
        self._tokenizer = tokenizer
        self._stop = stop
        self._window = BYTES_PER_CHARACTER * max(map(len, stop), default=0) + WINDOW_MARGIN

    def longest(self) -> int:
        """Bytes of UTF-8 that one token can decode to: a byte that is no character becomes three (U+FFFD), and some
        decoders put a space between words."""
        return 1 + max(3, *(len(token.encode()) for token in self._tokenizer.get_vocab()))

    def prompt_ids(self, prompt: str | list[dict[str, Any]]) -> NDArray[np.int32]:
        """Text goes through the tokenizer as it is; messages through the chat template, which writes its own first
        token, so none is added again.

        Raises:
            TaskError: there is no chat template for messages, it fails, or it does not show all that they say.
        """
        text = prompt if isinstance(prompt, str) else rendered(self._tokenizer, prompt)
        encoded = self._tokenizer(text, add_special_tokens=isinstance(prompt, str))
        return np.asarray(encoded["input_ids"], np.int32)

    def decode(self, tokens: NDArray[np.int32]) -> str:
        """Text without special tokens."""
        return self._decode(tokens, skip_special_tokens=True)

    def stops(self, tokens: NDArray[np.int32]) -> bool:
        """Whether the newest tokens complete a stop string. Seen in a window, then confirmed in the whole."""
        return bool(self._stop) and self._contains(tokens[-self._window :]) and self._contains(tokens)

    def before_stop(self, tokens: NDArray[np.int32]) -> str:
        """Text up to the first stop string. One that is written with special tokens is looked for with those."""
        for text in (self.decode(tokens), self._decode(tokens, skip_special_tokens=False)):
            found = [text.index(stop) for stop in self._stop if stop in text]
            if found:
                return text[: min(found)]
        return self.decode(tokens)

    def _contains(self, tokens: NDArray[np.int32]) -> bool:
        text = self._decode(tokens, skip_special_tokens=False)
        return any(stop in text for stop in self._stop)

    def _decode(self, tokens: NDArray[np.int32], *, skip_special_tokens: bool) -> str:
        return str(
            self._tokenizer.decode(
                tokens.tolist(), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
            )
        )


def end_ids(generation_config: Any, tokenizer: Any) -> NDArray[np.int64]:
    """End-of-sequence ids: those of the model's generation config and of the tokenizer together. Nothing else is ever
    taken from a generation config: only the experiment says how to sample."""
    named = [getattr(generation_config, "eos_token_id", None), tokenizer.eos_token_id]
    ids = {token for entry in named for token in (entry if isinstance(entry, list | tuple) else [entry])}
    return np.array(sorted(ids - {None}), np.int64)
