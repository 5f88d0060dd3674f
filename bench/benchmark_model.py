"""The model that the measurements of engines run on: a Llama of three million random weights, and its tokenizer.

Small enough for its weights to stay in the caches of two cores, which else would compete for memory.
"""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY = 2048
SHARPER = 3.0
"""Factor on the usual initialisation, under which all tokens would be equally likely."""


def make_subject(folder: Path) -> Path:
    """Write model and tokenizer into `folder`, unless they are there. Always the same weights."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    model = LlamaForCausalLM(_shape())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(SHARPER)
    make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Words w0, w1, ... divided by spaces, one token each; adds no special tokens by itself."""
    words = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def _shape() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
    )
