"""Models of random weights whose tokens are bytes, with the chat template that many models have and without one."""

import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CONTEXT = 1024


def save_model(folder: Path, template: str | None) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    fast = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    fast.add_special_tokens(list(SPECIAL))
    ends = {"pad_token": SPECIAL[0], "eos_token": SPECIAL[2]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, chat_template=template, **ends)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    ids = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    shape = {"vocab_size": len(tokenizer), "max_position_embeddings": CONTEXT, "tie_word_embeddings": True}
    LlamaForCausalLM(LlamaConfig(num_key_value_heads=2, **sizes, **ids, **shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="package")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("odd") / "chat", CHAT)


@pytest.fixture(scope="package")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("odd") / "plain", None)


@pytest.fixture
def folder(tmp_path: Path, chat_model: Path) -> Path:
    """A folder of an experiment with a model that chats."""
    (tmp_path / "model").symlink_to(chat_model)
    return tmp_path


@pytest.fixture
def own_model(tmp_path: Path, chat_model: Path) -> Path:
    """The model in a folder of an experiment, as a copy that may be changed."""
    return Path(shutil.copytree(chat_model, tmp_path / "model"))
