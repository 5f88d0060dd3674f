"""Memory of pictures: patches are counted as the image processor cuts them, and the encoder keeps what is predicted."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.deploy.checks.memory_needs import TrainedModel, needs, shared_memory
from asyncrl.deploy.checks.run_prompts import RowLengths, measured_lengths
from asyncrl.deploy.checks.worker_memory import KEPT_PICTURES, EngineMemory
from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models import picture_input
from asyncrl.engines.models.model_preparation import demonstrations_of
from asyncrl.engines.models.model_shape import EncoderShape, Shape, shape_of
from asyncrl.engines.models.picture_input import picture_states
from asyncrl.engines.models.prompt_pictures import PatchCounter, PictureProcessor
from asyncrl.engines.models.warmed_up_model import build_picture_model, build_picture_tokenizer
from asyncrl.errors import TaskError
from asyncrl.tasks.builtin.colours import training
from tests.unit.deploy.checks.torch_memory import most_beside

PATCHES = 512
SIZES = ((16, 16), (33, 17), (5, 100), (100, 20), (1, 3), (300, 300), (61, 470))
REAL = {
    "model_type": "qwen2_5_vl",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32,
        "hidden_size": 1280,
        "intermediate_size": 3420,
        "out_hidden_size": 2048,
        "in_chans": 3,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
}
"""The numbers of Qwen2.5-VL-3B, as the hub has them."""


def config(**training: Any) -> Config:
    task = {"prompts": "p", "prompts_per_step": 4, "samples_per_prompt": 4}
    return Config.model_validate({"model": {"name": "m"}, "task": task, "training": training})


def test_patches_are_those_of_the_image_processor(folder: Path, png: Any) -> None:
    processor = PictureProcessor(folder, 10**6)
    counter = PatchCounter.of_folder(folder)
    assert counter is not None
    for width, height in SIZES:
        file = png(width, height)
        assert counter.patches([file]) == processor.pictures([file]).grid.prod(1).tolist(), (width, height)
    assert PatchCounter.of_folder(folder.parent) is None
    with pytest.raises(TaskError, match=r"the size of a picture cannot be read: .*; replace the file"):
        counter.patches([b"no picture"])


def test_prompts_are_counted_with_the_tokens_of_their_pictures(
    folder: Path, tokenizer: TokenizerWithStops, asked: Any, png: Any, tmp_path: Path
) -> None:
    prompts = [asked("ab", png(32, 16)), asked(png(16, 24), "abc", png(40, 40))]
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in prompts))
    chosen = Config.model_validate({"model": {"name": str(folder)}, "task": {"prompts": str(path)}})
    seen = [tokenizer.prompt_and_pictures(prompt) for prompt in prompts]
    lengths = [len(ids) for ids, _ in seen]
    patches = [len(found.pictures.pixels) for _, found in seen if found is not None]
    expected = RowLengths(-(-sum(lengths) // 2), max(lengths), 4, -(-sum(patches) // 2))
    assert measured_lengths(chosen, str(folder)) == expected


def test_parameters_are_those_of_the_models(folder: Path) -> None:
    assert Shape.of(REAL).parameters == pytest.approx(3_754_622_976, rel=1e-3)
    shape = shape_of(str(folder))
    model = AutoModelForImageTextToText.from_pretrained(folder)
    assert shape is not None
    assert shape.encoder is not None
    encoder = model.model.visual.parameters()
    assert shape.encoder.parameters == sum(each.numel() for each in encoder)
    assert shape.parameters == pytest.approx(sum(each.numel() for each in model.parameters()), rel=0.01)


@pytest.fixture(name="encoding", scope="module")
def make_encoding() -> tuple[EncoderShape, Callable[[], None]]:
    """The shape of an encoder, and what computes the states of PATCHES patches."""
    torch.set_num_threads(1)
    text = {"hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    text |= {"num_key_value_heads": 4, "vocab_size": 64, "bos_token_id": 1, "eos_token_id": 2}
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
    eyes = {"depth": 3, "hidden_size": 96, "intermediate_size": 160, "num_heads": 3, "out_hidden_size": 96}
    ids = {f"{name}_token_id": 5 + number for number, name in enumerate(("image", "video", "vision_start"))}
    described = Qwen2_5_VLConfig(
        text_config={**text, "rope_parameters": rotation},
        vision_config={**eyes, "patch_size": 4, "spatial_merge_size": 2, "fullatt_block_indexes": [1]},
        **ids,
    )
    model = Qwen2_5_VLForConditionalGeneration(described)
    shape = Shape.of(described.to_dict())
    assert shape.encoder is not None
    grid = torch.tensor([[1, 16, 16], [1, 8, 32]])
    pixels = torch.randn(PATCHES, 3 * 2 * 4 * 4)

    def encode() -> None:
        picture_states(model, pixels, grid)

    encode()
    return shape.encoder, encode


Encoding = tuple[EncoderShape, Callable[[], None]]


def test_the_encoder_keeps_what_is_predicted(encoding: Encoding) -> None:
    encoder, encode = encoding
    assert encoder.kept_bytes(PATCHES, 4, again=False) == pytest.approx(most_beside(encode)[0], rel=0.1)


def test_a_pass_of_the_encoder_in_generation_takes_what_is_predicted(encoding: Encoding) -> None:
    encoder, encode = encoding
    with torch.no_grad():
        assert encoder.pass_bytes(PATCHES, 4) == pytest.approx(most_beside(encode)[0], rel=0.1)
    wide = replace(encoder, inner=10 * encoder.hidden)
    assert wide.pass_bytes(PATCHES, 4) == pytest.approx(PATCHES * 4 * 34 * encoder.hidden)


def test_pictures_of_prompts_in_flight_count_where_they_are_sampled() -> None:
    """Pixels of each group in flight, states of sixteen prompts, and a pass of one prompt."""
    shape = Shape.of(REAL)
    lengths = RowLengths(200, 400, 10, 300)
    assert shape.encoder is not None
    assert KEPT_PICTURES == picture_input.KEPT
    chosen = config()
    found = EngineMemory(chosen, shape, lengths).rows(largest=False)
    groups = GateConfig.of(chosen).cap
    pixels = 4 * 3 * 2 * 14 * 14 * 300
    assert groups > 16
    assert found["pictures"] == groups * pixels + 16 * 75 * 2048 * 4 + shape.encoder.pass_bytes(300, 4)
    for none in (RowLengths(200, 400, 10), RowLengths(200, 400, 10, 300)):
        text = shape if none.patches == 0 else Shape.of({**REAL, "model_type": "qwen2"})
        assert "pictures" not in EngineMemory(chosen, text, none).rows(largest=True)
    need = next(each for each in needs(chosen, shape, lengths) if each.name == "generation")
    assert need.parts["pictures"] > found["pictures"], "all tokens of the longest prompt may be of pictures"
    assert need.expected < need.bytes


def test_a_model_that_is_warmed_up_with_pictures_has_an_encoder() -> None:
    words = demonstrations_of("colours").words
    shape = shape_of("warmed:colours")
    tokenizer = build_picture_tokenizer(words)
    assert shape is not None
    assert shape.encoder is not None
    parameters = [each.numel() for each in build_picture_model(tokenizer).parameters()]
    assert shape.parameters == pytest.approx(sum(parameters), rel=0.01)
    assert (text := shape_of("warmed:reverse")) is not None
    assert text.encoder is None
    chosen = load("colours", []).config
    lengths, (row, *_) = measured_lengths(chosen, chosen.model.name), training(1)
    asked = tokenizer.apply_chat_template(row["prompt"], tokenize=False)
    assert lengths.mean == lengths.longest == len(tokenizer(asked)["input_ids"]) - 1 + 4, "a picture is four tokens"
    assert lengths.patches == 16


def test_a_micro_batch_encodes_each_of_its_prompts_once() -> None:
    """Eight samples on one rank have two prompts, and so have four on each of two ranks."""
    shape = Shape.of(REAL)
    lengths = RowLengths(200, 400, 10, 300)
    assert shape.encoder is not None
    for ranks in (1, 2):
        chosen = config(micro_batch_tokens=8 * (200 + 64) // ranks, layout={"dp": ranks})
        trained = TrainedModel("training", chosen, shape, lengths, "cpu", chosen.training.layout)
        assert trained.likely_pass.patches == 2 * 300
    chosen = config(micro_batch_tokens=8 * (200 + 64))
    with_eyes, without = (
        next(dict(each.parts)["activations"] for each in needs(chosen, each_shape, lengths) if each.name == "training")
        for each_shape in (shape, Shape.of({**REAL, "model_type": "qwen2"}))
    )
    most = shape.encoder.kept_bytes(4 * 4 * 400, 4, again=False)
    assert with_eyes - without == most, "each sample of the largest micro-batch may have a prompt of its own"
    again = shape.encoder.kept_bytes(10, 4, again=True)
    inputs = 10 * 4 * 32 * 1280
    assert again < shape.encoder.kept_bytes(10, 4, again=False) // 8
    assert again > inputs
    unknown = TrainedModel("training", chosen, shape, RowLengths(200, 400), "cpu", chosen.training.layout)
    assert unknown.likely_pass.patches == 2 * 200 * 4, "all tokens of a prompt may be of pictures"
    none = TrainedModel("training", chosen, shape, RowLengths(200, 400, 10), "cpu", chosen.training.layout)
    assert none.likely_pass.patches == 0


def test_pixels_count_on_each_rank_and_in_shared_memory() -> None:
    """A rank holds those of all prompts of a step, and a copy for a micro-batch; a row of them lies beside the samples
    of each group in flight."""
    shape = Shape.of(REAL)
    lengths = RowLengths(200, 400, 10, 300)
    group = 4 * 3 * 2 * 14 * 14 * 300
    chosen = config(micro_batch_tokens=8 * (200 + 64))
    trained = TrainedModel("training", chosen, shape, lengths, "cpu", chosen.training.layout)
    assert trained.parts(trained.likely_pass, 0)["pixels"] == (4 + 2) * group
    text = Shape.of({**REAL, "model_type": "qwen2"})
    with_eyes, without = (shared_memory(chosen, each, lengths=lengths) for each in (shape, text))
    groups = -(-GateConfig.of(chosen).kept // 4)
    found = with_eyes.likely_rows - without.likely_rows
    assert groups * group < found < 1.3 * groups * group
    assert with_eyes.rows - without.rows > 4 * groups * group, "all tokens of the longest prompt may be of pictures"
    assert shared_memory(chosen, shape, lengths=RowLengths(200, 400, 10)).rows == without.rows
