"""Writes the model for engine measurements, a Llama with three million random weights, and samples lengths from it that
are prescribed, so that all compared systems sample the same numbers of tokens.

The weights fit into the caches of two cores, so that the cores do not compete for memory.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import NO_WEIGHTS, GenerationEngine
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.generation.torch_generation import TorchGeneration
from asyncrl.engines.generation.turn_requests import Turn
from asyncrl.protocols.batch import RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.services.generation import GenerationService

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
VOCABULARY = 2048
LOGIT_FACTOR = 3.0
"""Factor on the usual initialisation, which would make all tokens about equally likely."""


def write_model(folder: Path, family: str = "llama", /, **sizes: int) -> Path:
    """Writes model and tokenizer into `folder` unless they exist. The weights are always the same. sizes: of the
    config of the family, in place of those of three million weights."""
    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    usual = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6}
    usual |= {"num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 512}
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCABULARY,
        **usual | sizes,
        tie_word_embeddings=False,
        pad_token_id=SPECIAL.index("<pad>"),
        bos_token_id=SPECIAL.index("<bos>"),
        eos_token_id=SPECIAL.index("<eos>"),
    )
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name:
                parameter.mul_(LOGIT_FACTOR)
    make_tokenizer().save_pretrained(folder)
    model.save_pretrained(folder)
    return folder


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a tokenizer of words w0, w1, ... between spaces, one token each, which adds no special tokens."""
    words = [f"w{number}" for number in range(VOCABULARY - len(SPECIAL))]
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


class EndlessEngine(TorchEngine):
    """Ignores end tokens, so that every completion has its requested length."""

    def __init__(self, folder: Path, config: Config, version: int = NO_WEIGHTS) -> None:
        super().__init__(folder, config, version)
        self._end_ids = np.zeros(0, np.int64)


class PrescribedLengths(GenerationService):
    """Samples completions of the option `lengths`: tokens of each sample of a batch, the same for every batch."""

    async def _requested(self, prompts: PromptGroup) -> tuple[list[Turn], list[RowRef]]:
        task = self.context.config.task
        lengths = self.context.spec.options["lengths"]
        first = (prompts.id % task.prompts_per_step) * task.samples_per_prompt
        turns, ended = await super()._requested(prompts)
        return [
            replace(turn, request=replace(turn.request, max_new_tokens=lengths[first + member]))
            for turn, member in zip(turns, prompts.members, strict=True)
        ], ended

    async def _open_engine(self) -> GenerationEngine:
        return await TorchGeneration.open(self.context, copies=self._evaluates, engine=EndlessEngine)
