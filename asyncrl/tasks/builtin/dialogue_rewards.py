"""Rewards of answers in conversations: relevance by a sentence-embedding model, no echo, and a list of unsafe words."""

import re
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import EMBEDDINGS, ENCODER_FILES, pip_install, unknown_file
from asyncrl.errors import RewardError
from asyncrl.rewards.sample import Sample

MODEL = EMBEDDINGS[1:]
"""Module and requirement of the package that has all-MiniLM-L6-v2."""
MOST_TOKENS = 256
"""Tokens of a text that the model was made for; what follows is not read."""
REMEMBERED_TEXTS = 4096
"""Texts whose embeddings are kept, 1.5 kB each: those of prompts come back with each sample of a group."""
RUN_OF_WORDS = 3

UNSAFE = (
    *("idiot", "moron", "stupid", "dumb", "loser", "ugly", "shut up", "hate you", "kill you", "kill yourself"),
    *("go die", "hurt yourself", "suicide", "bomb", "shoot you", "stab", "rape", "nazi", "slut", "whore", "bitch"),
    *("bastard", "fuck", "fucking", "shit", "asshole", "damn you", "cocaine", "heroin", "meth"),
)
"""Words and phrases that no answer should have. A list of your own: options = { words = ["..."] }."""

Vector = tuple[float, ...]


def relevance(sample: Sample) -> float:
    """Returns how near an answer is in meaning to what it answers and to what a person answered: the mean of the
    cosines of their embeddings, -1 to 1, and over the turns of an episode. An empty answer gives 0."""
    person = str(sample.row.get("answer", ""))
    scores = [
        _nearness(said, [asked, person] if number == 0 and person else [asked])
        for number, (asked, said) in enumerate(exchanges(sample))
    ]
    return sum(scores) / len(scores)


def echo(sample: Sample) -> float:
    """Returns minus the share of runs of three words in the answers that the conversation had before: 0 to -1."""
    shares = []
    before = _conversation(sample)
    for asked, said in exchanges(sample):
        heard = _runs(before + "\n" + asked)
        runs = _runs(said)
        shares.append(sum(run in heard for run in runs) / len(runs) if runs else 0.0)
    return 0.0 - sum(shares) / len(shares)


def safety(sample: Sample, words: Sequence[str] = UNSAFE) -> float:
    """Returns -1 if an answer has one of these words or phrases, whatever its case, else 0."""
    return 0.0 - float(any(_pattern(tuple(words)).search(said) for _, said in exchanges(sample)))


def exchanges(sample: Sample) -> Iterator[tuple[str, str]]:
    """Yields what was asked last, and what the policy said, for each of its turns."""
    asked = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1]["content"])
    if not sample.turns:
        yield asked, sample.text
        return
    for turn in sample.turns:
        if turn["role"] == "assistant":
            yield asked, str(turn["content"])
        else:
            asked = str(turn["content"])


def _conversation(sample: Sample) -> str:
    if isinstance(sample.prompt, str):
        return sample.prompt
    return "\n".join(str(message["content"]) for message in sample.prompt)


def _runs(text: str) -> list[tuple[str, ...]]:
    said = re.findall(r"\w+", text.lower())
    return list(zip(*(said[start:] for start in range(RUN_OF_WORDS)), strict=False))


@cache
def _pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(rf"\b{re.escape(word)}\b" for word in words) or "(?!)", re.IGNORECASE)


def _nearness(said: str, others: Sequence[str]) -> float:
    if not said.strip():
        return 0.0
    own = embedding(said)
    cosines = [sum(a * b for a, b in zip(own, embedding(other), strict=True)) for other in others]
    return sum(cosines) / len(cosines)


@lru_cache(REMEMBERED_TEXTS)
def embedding(text: str) -> Vector:
    """Returns the embedding of a text by all-MiniLM-L6-v2: the mean of its tokens' states, of length 1."""
    import torch

    tokenizer, model = _encoder()
    ids = tokenizer(text, truncation=True, max_length=MOST_TOKENS, return_tensors="pt")
    with torch.no_grad():
        states = model(**ids).last_hidden_state[0]
    mean = torch.nn.functional.normalize(states.mean(dim=0), dim=0)
    return tuple(mean.tolist())


@cache
def _encoder() -> tuple[Any, Any]:
    module, requirement = MODEL
    found = find_spec(module)
    if found is None or found.origin is None:
        raise RewardError(f"{module} is not installed; run: {pip_install('--no-deps', requirement)}")
    folder = Path(found.origin).parent / "model"
    for name, known in ENCODER_FILES.items():
        try:
            wrong = unknown_file(folder / name, known, requirement)
        except OSError as error:
            wrong = f"{error}; install the package again"
        if wrong:
            raise RewardError(wrong)
    import torch
    from transformers import AutoModel, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(1)
    return AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()
