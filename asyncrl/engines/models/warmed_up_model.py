"""Makes a tiny Llama, or Qwen2.5-VL, that knows the format of a task and still has something to learn, by supervised
training on demonstrations, which takes seconds on one thread. The same seed gives the same model."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.engines.models.picture_input import PictureInput, picture_layout
from asyncrl.engines.models.prompt_pictures import PictureProcessor
from asyncrl.engines.models.warmed_model_cache import BATCH, CONTEXT, EYES, HEADS, MERGE, MOST_PIXELS, PATCH
from asyncrl.tasks.builtin.words import Demonstrations

Show = Callable[[str], None]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
CHAT = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'system' %} {% elif m.role == 'assistant' %}{{ eos_token }}"
    "{% endif %}{% endfor %}"
)
CHARACTERS = tuple(chr(code) for code in range(32, 127))
LEARNING_RATE = 6e-3
IGNORED = -100  # target of tokens that are not learnt


def warm_up(demonstrations: Demonstrations, seed: int, target: Path, show: Show, heads: int = HEADS) -> None:
    """Writes a warmed-up model with so many heads, and its tokenizer, to `target`, as `from_pretrained` reads it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = build_tokenizer(demonstrations.words)
    model = build_model(tokenizer, heads=heads)
    train(model, tokenizer, demonstrations, seed, show)
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)


def build_tokenizer(
    words: tuple[str, ...], template: str = CHAT, more_special: tuple[str, ...] = ()
) -> PreTrainedTokenizerFast:
    """Builds a tokenizer with one token per word and per printable character; it adds no special tokens by itself, and
    its chat template none but the ends of answers, as demonstrations have them, and a space behind a system message.
    more_special: further special tokens, which a template may write."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL.values(), *CHARACTERS, *words, *more_special))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL["unk_token"]))
    pattern = "|".join([*map(re.escape, words), r"[\s\S]"])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {**SPECIAL, **({"extra_special_tokens": [*more_special]} if more_special else {})}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template, **special)


def build_model(tokenizer: PreTrainedTokenizerFast, context: int = CONTEXT, heads: int = HEADS) -> LlamaForCausalLM:
    """Builds a randomly initialised Llama of about 0.3M parameters. context: positions that it is made for."""
    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": heads}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    shape = {**sizes, **special, "max_position_embeddings": context, "tie_word_embeddings": True}
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), num_key_value_heads=heads, **shape))


def train(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, demonstrations: Demonstrations, seed: int, show: Show
) -> None:
    source = random.Random(seed)

    def loss() -> Tensor:
        return completion_loss(model, tokenizer, [demonstrations.draw(source) for _ in range(BATCH)])

    fit(model, demonstrations.steps, loss, show)


def fit(model: torch.nn.Module, steps: int, loss_of_step: Callable[[], Tensor], show: Show) -> None:
    """Trains a model for so many steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 50, 1 - step / (steps + 1)))
    for step in range(1, steps + 1):
        loss = loss_of_step()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0 or step == steps:
            show(f"warming up a tiny model: step {step} of {steps}, loss {loss.item():.2f}")


def completion_loss(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, pairs: list[tuple[str, str]]
) -> Tensor:
    """Computes the mean cross-entropy of the completion tokens and their <eos>, given the prompts."""
    rows = [(tokenizer.encode(prompt), answer) for prompt, answer in pairs]
    return _loss(tokenizer, rows, lambda ids: model(input_ids=ids).logits)


def _loss(
    tokenizer: PreTrainedTokenizerFast, rows: list[tuple[list[int], str]], logits_of: Callable[[Tensor], Tensor]
) -> Tensor:
    """Returns the mean cross-entropy of answers and their <eos> after the tokens of prompts."""
    ids = []
    wanted = []
    for given, answer in rows:
        learnt = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        ids.append(torch.tensor(given + learnt))
        wanted.append(torch.tensor([IGNORED] * len(given) + learnt)[1:])
    logits = logits_of(pad_sequence(ids, batch_first=True))[:, :-1]
    targets = pad_sequence(wanted, batch_first=True, padding_value=IGNORED)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


# A tiny Qwen2.5-VL in its place, for a task with pictures: the same with eyes, one layer that sees patches of 4 x 4
# pixels, of which 2 x 2 are a token.


PICTURE = "<picture>"
VIDEO = "<video>"
BEGIN = "<vision>"
END = "</vision>"
"""Tokens of pictures: the first stands for each of theirs."""
PICTURE_CHAT = (
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
    processor = PictureProcessor(target, MOST_PIXELS)
    source = random.Random(seed)
    fit(model, demonstrations.steps, lambda: picture_loss(model, tokenizer, processor, demonstrations, source), show)
    model.save_pretrained(target)


def build_picture_tokenizer(words: tuple[str, ...]) -> PreTrainedTokenizerFast:
    """Builds a tokenizer as `build_tokenizer`, with tokens for pictures."""
    return build_tokenizer(words, PICTURE_CHAT, (PICTURE, VIDEO, BEGIN, END))


def build_picture_model(tokenizer: PreTrainedTokenizerFast) -> Any:
    """Builds a randomly initialised Qwen2.5-VL of about 0.4M parameters."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # not at the top: few models see

    sizes = {"hidden_size": 96, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4}
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    text = {**sizes, **special, "num_key_value_heads": 4, "max_position_embeddings": CONTEXT}
    ids = {
        f"{name}_token_id": tokenizer.convert_tokens_to_ids(token)
        for name, token in (("image", PICTURE), ("video", VIDEO), ("vision_start", BEGIN), ("vision_end", END))
    }
    config = Qwen2_5_VLConfig(
        text_config={**text, "vocab_size": len(tokenizer), "rope_parameters": rotation, "tie_word_embeddings": True},
        vision_config=EYES,
        tie_word_embeddings=True,
        **ids,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def save(model: Any, tokenizer: PreTrainedTokenizerFast, target: Path) -> None:
    """Writes a model with tokenizer and image processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MOST_PIXELS}
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    Qwen2VLImageProcessorPil(size=size, patch_size=PATCH, merge_size=MERGE).save_pretrained(target)


def picture_loss(
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    processor: PictureProcessor,
    demonstrations: Demonstrations,
    source: random.Random,
) -> Tensor:
    """Returns the mean cross-entropy of the answers of one batch and their <eos>, given pictures and questions."""
    assert demonstrations.picture is not None, "these demonstrations have pictures"
    asked = np.array(tokenizer.encode(f"{BEGIN}{PICTURE}{END}{demonstrations.question}"), np.int32)
    rows = []
    prompts = []
    for _ in range(BATCH):
        named, answer = demonstrations.draw(source)
        given, picture = processor.with_tokens(asked, processor.pictures([demonstrations.picture(named)]))
        rows.append((given.tolist(), answer))
        prompts.append(picture)

    def logits(ids: Tensor) -> Tensor:
        pictures = PictureInput.of(prompts, ids.shape[1])
        assert pictures is not None, "each demonstration has a picture"
        found: Tensor = model(**picture_layout(model, ids, pictures)).logits
        return found

    return _loss(tokenizer, rows, logits)
