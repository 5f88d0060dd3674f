"""Makes a tiny Qwen2.5-VL that knows the format of a task with pictures, by supervised training on demonstrations.

It is `warmed_up_model.py` with eyes: one layer that sees patches of 4 x 4 pixels, of which 2 x 2 are a token.
"""

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerFast, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from asyncrl.engines.models.picture_input import PictureInput, picture_layout
from asyncrl.engines.models.prompt_pictures import PictureProcessor
from asyncrl.engines.models.warmed_model_cache import BATCH, CONTEXT, EYES, MERGE, MOST_PIXELS, PATCH
from asyncrl.engines.models.warmed_up_model import IGNORED, Show, build_tokenizer, fit
from asyncrl.tasks.builtin.words import Demonstrations

PICTURE = "<picture>"
VIDEO = "<video>"
BEGIN = "<vision>"
END = "</vision>"
"""Tokens of pictures: the first stands for each of theirs."""
CHAT = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}" + BEGIN + PICTURE + END + "{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{% if m.role == 'system' %} {% elif m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def warm_up_with_pictures(demonstrations: Demonstrations, seed: int, target: Path, show: Show) -> None:
    """Writes a warmed-up model, its tokenizer and its image processor to `target`, as `from_pretrained` reads it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = build_picture_tokenizer(demonstrations.words)
    model = build_picture_model(tokenizer)
    save(model, tokenizer, target)
    lesson = Lesson(model, tokenizer, PictureProcessor(target, MOST_PIXELS), demonstrations)
    source = random.Random(seed)
    fit(model, demonstrations.steps, lambda: lesson.loss(source), show)
    model.save_pretrained(target)


def build_picture_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Builds a tokenizer as `build_tokenizer`, with tokens for pictures."""
    return build_tokenizer(words, CHAT, (PICTURE, VIDEO, BEGIN, END))


def build_picture_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2_5_VLForConditionalGeneration:
    """Builds a randomly initialised Qwen2.5-VL of about 0.4M parameters."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    text = {
        **sizes,
        **special,
        "num_key_value_heads": 4,
        "max_position_embeddings": CONTEXT,
        "vocab_size": len(tokenizer),
    }
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (("image", PICTURE), ("video", VIDEO), ("vision_start", BEGIN), ("vision_end", END))
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rotation, "tie_word_embeddings": True},
        vision_config=EYES,
        tie_word_embeddings=True,
        **ids,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def save(model: Qwen2_5_VLForConditionalGeneration, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Writes a model with tokenizer and image processor."""
    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MOST_PIXELS}
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=MERGE).save_pretrained(target)


class Lesson:
    """Draws demonstrations and computes their loss."""

    def __init__(
        self,
        model: Qwen2_5_VLForConditionalGeneration,
        tokenizer: PreTrainedTokenizerFast,
        processor: PictureProcessor,
        demonstrations: Demonstrations,
    ) -> None:
        assert demonstrations.picture is not None, "these demonstrations have pictures"
        self._model = model
        self._tokenizer = tokenizer
        self._processor = processor
        self._demonstrations = demonstrations
        self._picture = demonstrations.picture

    def loss(self, source: random.Random) -> Tensor:
        """Returns the mean cross-entropy of the answers of one batch and their <eos>, given pictures and questions."""
        rows = []
        wanted = []
        prompts = []
        for _ in range(BATCH):
            named, answer = self._demonstrations.draw(source)
            given, picture = self._processor.with_tokens(
                self._asked(), self._processor.pictures([self._picture(named)])
            )
            learnt = [*self._tokenizer.encode(answer), self._tokenizer.eos_token_id]
            rows.append(torch.from_numpy(np.concatenate([given, learnt]).astype(np.int64)))
            wanted.append(torch.tensor([IGNORED] * len(given) + learnt)[1:])
            prompts.append(picture)
        ids = pad_sequence(rows, batch_first=True)
        pictures = PictureInput.of(prompts, ids.shape[1])
        assert pictures is not None, "each demonstration has a picture"
        logits = self._model(**picture_layout(self._model, ids, pictures)).logits[:, :-1]
        targets = pad_sequence(wanted, batch_first=True, padding_value=IGNORED)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)

    def _asked(self) -> Any:
        text = f"{BEGIN}{PICTURE}{END}{self._demonstrations.question}"
        return np.array(self._tokenizer.encode(text), np.int32)
