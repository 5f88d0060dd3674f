"""Model folders as they come in the world: what is refused before a fleet starts, and what trains nevertheless."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncrl.config.schema import Config
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.errors import ConfigError
from tests.unit.odd_inputs.trial import Refused, Trains, check

Change = Callable[[Path], object]
WEIGHTS = "model.safetensors"
DESCRIPTION = "config.json"
TRAINS = Trains(["a"])


def write(name: str, content: bytes | str) -> Change:
    return lambda model: (model / name).write_bytes(content if isinstance(content, bytes) else content.encode())


def remove(pattern: str) -> Change:
    return lambda model: [path.unlink() for path in model.glob(pattern)]


def describe(name: str = DESCRIPTION, **values: Any) -> Change:
    def change(model: Path) -> None:
        found = {**json.loads((model / name).read_text()), **values}
        kept = {key: value for key, value in found.items() if value is not None}
        (model / name).write_text(json.dumps(kept))

    return change


def weigh(change: Callable[[dict[str, torch.Tensor]], object]) -> Change:
    def apply(model: Path) -> None:
        tensors = load_file(model / WEIGHTS)
        save_file(change(tensors) or tensors, model / WEIGHTS, {"format": "pt"})

    return apply


def without_ends(model: Path) -> None:
    describe("tokenizer_config.json", eos_token=None, pad_token=None)(model)
    describe(eos_token_id=None, pad_token_id=None)(model)
    describe("generation_config.json", eos_token_id=None, pad_token_id=None)(model)


def more_tokens(model: Path) -> None:
    found = json.loads((model / "tokenizer.json").read_text())
    found["model"]["vocab"]["zz"] = 300
    (model / "tokenizer.json").write_text(json.dumps(found))


def as_a_file(model: Path) -> None:
    shutil.rmtree(model)
    model.write_text("weights")


UP = "model.layers.0.mlp.up_proj.weight"
TABLE: dict[str, tuple[Change, Trains | Refused]] = {
    "no tokenizer": (remove("tokenizer*"), Refused(["there is no tokenizer in model", "save_pretrained"])),
    "a tokenizer without pad and end": (without_ends, TRAINS),
    "a tokenizer of another model": (
        more_tokens,
        Refused(["ids up to 300", "embedding 259 rows"]),
    ),
    "an empty description": (write(DESCRIPTION, ""), Refused(["config.json is cut short or damaged", "once more"])),
    "a description that is a list": (write(DESCRIPTION, "[]"), Refused(["config.json is damaged: it holds []"])),
    "a description that is null": (write(DESCRIPTION, "null"), Refused(["config.json is damaged: it holds null"])),
    "a description without a family": (describe(model_type=None), Refused(["config.json names no model_type"])),
    "a size that is a text": (describe(hidden_size="32"), Refused(['hidden_size is "32", and not a number from 1'])),
    "no layers": (describe(num_hidden_layers=0), Refused(["num_hidden_layers is 0"])),
    "positions that are a text": (describe(max_position_embeddings="4k"), Refused(['max_position_embeddings is "4k"'])),
    "heads that do not divide": (
        describe(num_attention_heads=3, head_dim=None),
        Refused(["32 is no multiple of"]),
    ),
    "fewer layers than described": (describe(num_hidden_layers=2), Refused(["hold 1 layers", "num_hidden_layers = 2"])),
    "an embedding larger than described": (describe(vocab_size=100), Refused(["has 259 rows", "vocab_size = 100"])),
    "quantized weights": (
        describe(quantization_config={"quant_method": "gptq", "bits": 4}),
        Refused(["quantized (gptq)", "take the model that was quantized"]),
    ),
    "whole numbers as weights": (
        weigh(lambda tensors: {name: each.to(torch.int8) for name, each in tensors.items()}),
        Refused(["whole numbers (I8)", "take the model in bfloat16"]),
    ),
    "bfloat16": (weigh(lambda tensors: {name: each.bfloat16() for name, each in tensors.items()}), TRAINS),
    "weights of nothing": (weigh(lambda tensors: tensors.update(other=torch.zeros(2))), TRAINS),
    "a tokenizer that is a list": (write("tokenizer_config.json", "[]"), Refused(["tokenizer_config.json is damaged"])),
    "a tokenizer without tokens": (write("tokenizer.json", "7"), Refused(["tokenizer.json is damaged: it holds 7"])),
    "settings that are a list": (write("generation_config.json", "[]"), Refused(["generation_config.json is damaged"])),
    "a template in another encoding": (write("chat_template.jinja", b"\xe9"), Refused(["jinja is damaged", "UTF-8"])),
    "weights that are a page": (
        write(WEIGHTS, "<!DOCTYPE html>"),
        Refused(["cut short or damaged", "15 bytes"]),
    ),
    "weights cut short": (lambda model: os.truncate(model / WEIGHTS, 3000), Refused(["3000 bytes", "once more"])),
    "a list of parts that is a list": (write("model.safetensors.index.json", "[]"), Refused(["index.json is damaged"])),
    "adapters alone": (
        lambda model: [remove("*")(model), write("adapter_config.json", "{}")(model)],
        Refused(["model holds adapters, and not the model", "asyncrl export RUN FOLDER --merge"]),
    ),
    "a file": (as_a_file, Refused(["model is a file; name the folder with config.json"])),
}


@pytest.mark.parametrize(("change", "expected"), TABLE.values(), ids=TABLE)
def test_model_folders(change: Change, expected: Trains | Refused, own_model: Path, tmp_path: Path) -> None:
    change(own_model)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a"}')
    check(tmp_path, (), expected)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda tensors: {name: each for name, each in tensors.items() if name != UP},
            rf"has no weights {UP}, which its config\.json describes",
        ),
        (lambda tensors: tensors.update({UP: torch.zeros(3, 3)}), r"have other shapes than its config\.json describes"),
    ],
    ids=["missing", "of another shape"],
)
def test_no_weights_are_made_at_random(change: Callable[..., Any], says: str, own_model: Path) -> None:
    weigh(change)(own_model)
    with pytest.raises(ConfigError, match=rf"^model\.name: .*{says}"):
        load_pretrained(own_model)


def test_weights_that_are_no_numbers_are_refused_as_such(own_model: Path) -> None:
    weigh(lambda tensors: tensors.update({UP: tensors[UP] * float("nan")}))(own_model)
    config = Config.model_validate(
        {"model": {"name": str(own_model)}, "task": {"prompts": "p", "max_prompt_tokens": 9}}
    )
    with pytest.raises(ConfigError, match=r"^model\.name: the model computes NaN: its weights hold NaN or infinity"):
        TorchEngine(own_model, config)
