"""The chat templates that TRL ships go on for several turns, or say why they do not."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer
from asyncrl.errors import TaskError
from asyncrl.tasks.turn_template import TurnTemplate

END = 1
OF_TOOLS = {  # Templates that write no messages of tools, or not after any answer, and what is said of them.
    "leaves out messages": ("cohere2", "diffusion_gemma", "gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "phi3"),
    "depends on earlier turns": ("deepseek_r1_distill", "deepseekv3"),
    "fails on this prompt": ("cohere", "gemma", "gemma3", "gptoss", "llava_next"),
}


def templates() -> Iterator[Path]:
    found = find_spec("trl")
    folders = found.submodule_search_locations if found is not None else None
    for folder in folders or ():
        yield from sorted(
            path for path in Path(folder, "chat_templates").glob("*.jinja") if not path.stem.endswith("_training")
        )


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokens = ["<bos>", "<eos>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<bos>", eos_token="<eos>")


def said_of(tokenizer: Any, role: str) -> str:
    try:
        TurnTemplate(TokenizerWithStops(tokenizer, ()).render_chat).refuse_role(role)
    except TaskError as error:
        return str(error)
    return ""


@pytest.mark.skipif(not list(templates()), reason="TRL is not installed")
@pytest.mark.parametrize("path", list(templates()), ids=lambda path: path.stem)
def test_templates_of_trl_go_on_with_users_and_most_with_tools(tokenizer: Any, path: Path) -> None:
    tokenizer.chat_template = path.read_text(encoding="utf-8")
    assert said_of(tokenizer, "user") == ""
    refused = next((why for why, names in OF_TOOLS.items() if path.stem.removesuffix("_5") in names), "")
    found = said_of(tokenizer, "tool")
    assert refused in found
    assert bool(refused) == bool(found)
    renderer = TurnRenderer(TokenizerWithStops(tokenizer, ()), np.array([END]))
    answer = np.array([*TokenizerWithStops(tokenizer, ()).text_ids("<think>\nso\n</think>\n\nyes"), END], np.int32)
    for role in ["user"] if refused else ["user", "tool"]:
        given = renderer.given_ids(answer, [{"role": role, "content": "more7"}], chat=True)
        shown = tokenizer.decode(given)
        assert "more7" in shown
        assert "so\n</think>" not in shown, "nothing of the answer is given again"
