"""Makes a tiny Llama that knows the format of a task and still has something to learn, by supervised training on
demonstrations, which takes seconds on one thread. The same seed gives the same model."""

import random
import re
from collections.abc import Callable
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.engines.models.warmed_model_cache import BATCH, CONTEXT, HEADS
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
    rows = []
    wanted = []
    for prompt, answer in pairs:
        given = tokenizer.encode(prompt)
        learnt = [*tokenizer.encode(answer), tokenizer.eos_token_id]
        rows.append(torch.tensor(given + learnt))
        wanted.append(torch.tensor([IGNORED] * len(given) + learnt)[1:])
    logits = model(input_ids=pad_sequence(rows, batch_first=True)).logits[:, :-1]
    targets = pad_sequence(wanted, batch_first=True, padding_value=IGNORED)
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
