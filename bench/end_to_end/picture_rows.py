"""A Qwen2.5-VL with random weights, and rows whose prompts are a picture each, of the same number of tokens."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from asyncrl.bench.end_to_end.benchmark_model import SPECIAL, VOCABULARY, make_tokenizer
from asyncrl.bench.end_to_end.packed_rows import StepShape, rows_of
from asyncrl.engines.pictures.prompt_pictures import Pictures, PromptPictures
from asyncrl.engines.training.batch.train_rows import TrainRow

PICTURE, VIDEO, BEGIN, END = range(VOCABULARY - 4, VOCABULARY)
"""Ids of the tokens of pictures."""
MERGE, PATCH = 2, 14
EYES = {"depth": 4, "hidden_size": 192, "intermediate_size": 512, "num_heads": 6, "fullatt_block_indexes": [1, 3]}
HIGH = 8
"""Patches of a picture from top to bottom."""


def write_picture_model(folder: Path, **sizes: int) -> None:
    """Writes model and tokenizer. sizes: of the language model."""
    torch.manual_seed(0)
    rotation = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    special = {f"{name}_token_id": SPECIAL.index(f"<{name}>") for name in ("pad", "bos", "eos")}
    text = {**sizes, **special, "vocab_size": VOCABULARY, "max_position_embeddings": 512, "rope_parameters": rotation}
    ids = {"image_token_id": PICTURE, "video_token_id": VIDEO, "vision_start_token_id": BEGIN}
    config = Qwen2_5_VLConfig(
        text_config={**text, "tie_word_embeddings": False},
        vision_config={**EYES, "out_hidden_size": sizes["hidden_size"], "patch_size": PATCH},
        tie_word_embeddings=False,
        vision_end_token_id=END,
        **ids,
    )
    Qwen2_5_VLForConditionalGeneration(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def patches_of(shape: StepShape) -> int:
    """Returns the patches of the picture of a prompt, whose tokens are half of those of the prompt."""
    return shape.prompt // 2 * MERGE**2


def rows_with_pictures(shape: StepShape) -> list[TrainRow]:
    """Returns the rows of `rows_of`, with the picture of each group in its prompt."""
    rows, wide = [], patches_of(shape) // HIGH
    draw = np.random.default_rng(0)
    shown: dict[int, tuple[Pictures, np.ndarray[tuple[int, ...], np.dtype[np.int64]]]] = {}
    for row in rows_of(shape):
        if row.group not in shown:
            pixels = draw.normal(size=(HIGH * wide, 3 * 2 * PATCH**2)).astype(np.float32)
            ids = np.minimum(row.prompt_ids, PICTURE - 1)
            ids[1 : 1 + shape.prompt // 2] = PICTURE
            shown[row.group] = Pictures(pixels, np.array([[1, HIGH, wide]])), ids
        pictures, ids = shown[row.group]
        seen = PromptPictures.of(pictures, ids, PICTURE, MERGE)
        rows.append(replace(row, prompt_ids=ids, pictures=seen))
    return rows
