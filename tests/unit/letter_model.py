"""A tiny random language model whose tokens are letters."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LETTERS = "abcdefghij"


def write_letter_model(folder: Path) -> None:
    """Writes the model and its tokenizer: the end token is 0, and the letters follow it."""
    torch.manual_seed(1)
    torch.set_num_threads(1)
    vocabulary = {token: number for number, token in enumerate(["<eos>", *LETTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>").save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=len(vocabulary), **sizes)).save_pretrained(folder)
