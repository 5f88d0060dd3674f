"""What a model's image processor makes of the pictures of a prompt, and where the model sees them."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.engines.generation.tokenization import TokenizerWithStops
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.models.prompt_pictures import PictureProcessor, Pictures, PromptPictures
from asyncrl.errors import ConfigError, TaskError


def test_each_picture_takes_its_tokens_in_the_prompt(tokenizer: TokenizerWithStops, asked: Any, png: Any) -> None:
    ids, found = tokenizer.prompt_and_pictures(asked("ab", png(32, 16), "cd", png(16, 24, 1)))
    assert found is not None
    assert found.pictures.grid.tolist() == [[1, 4, 8], [1, 6, 4]]
    assert found.pictures.pixels.shape == (32 + 24, 3 * 2 * 4 * 4)
    assert found.places.tolist() == [*range(3, 3 + 8), *range(3 + 8 + 4, 3 + 8 + 4 + 6)]
    assert tokenizer.decode(ids) == "abcd"
    assert tokenizer.prompt_ids(asked("ab", png(32, 16))).tolist() == ids[:12].tolist()


def test_positions_are_those_of_transformers(folder: Path, tokenizer: TokenizerWithStops, asked: Any, png: Any) -> None:
    model = load_pretrained(folder).model
    for parts in (["ab", png(40, 16), "c", png(16, 56), "def"], [png(), "a"], ["a", png(16, 16)]):
        ids, found = tokenizer.prompt_and_pictures(asked(*parts))
        assert found is not None
        tokens = torch.from_numpy(ids.astype(np.int64))[None]
        kinds = (tokens == model.config.image_token_id).int()
        positions, delta = model.get_rope_index(tokens, kinds, torch.from_numpy(found.pictures.grid))
        assert np.array_equal(found.positions, positions[:, 0].numpy())
        assert found.delta == delta.item()
        behind = found.positions_at(np.array([2, len(ids), len(ids) + 3]))
        assert behind[:, 1:].tolist() == [[len(ids) + found.delta, len(ids) + 3 + found.delta]] * 3
        assert behind[:, 0].tolist() == positions[:, 0, 2].tolist()


def test_a_row_of_pictures_gives_back_what_was_stored(tokenizer: TokenizerWithStops, asked: Any, png: Any) -> None:
    ids, found = tokenizer.prompt_and_pictures(asked(png(32, 16), "a", png()))
    assert found is not None
    columns = found.columns()
    again = PromptPictures.of_columns(columns, len(ids))
    pictures = found.pictures
    assert np.array_equal(again.positions, found.positions)
    assert again.places.tolist() == found.places.tolist()
    assert again.pictures.digest == pictures.digest != Pictures(pictures.pixels + 1, pictures.grid).digest
    most = tokenizer.picture_columns(len(ids))
    assert list(most) == list(columns)
    for name, (dtype, length) in most.items():
        assert columns[name].dtype == dtype
        assert len(columns[name]) <= length


def test_what_is_no_picture_is_refused(tokenizer: TokenizerWithStops, asked: Any, png: Any) -> None:
    with pytest.raises(TaskError, match="picture 2 of the prompt cannot be decoded: "):
        tokenizer.prompt_ids(asked(png(), png(64, 64)[:90]))
    with pytest.raises(TaskError, match=r"65 x 64 pixels and task.max_picture_pixels is 4096: .* = 4160"):
        tokenizer.prompt_ids(asked(png(65, 64)))
    with pytest.raises(TaskError, match="the model's image processor refuses a picture"):
        tokenizer.prompt_ids(asked(png(1, 700)))
    with pytest.raises(TaskError, match="1 pictures, and the model's chat template marks 2"):
        tokenizer.prompt_ids(asked(png(), "<picture>"))


def test_a_model_without_eyes_refuses_pictures(
    folder: Path, tokenizer: TokenizerWithStops, asked: Any, png: Any, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match="the model reads none"):
        TokenizerWithStops(tokenizer._tokenizer, ()).prompt_ids(asked(png()))
    with pytest.raises(TaskError, match="an environment begins without pictures"):
        tokenizer.prompt_ids(asked(png()), by_environment=True)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert PictureProcessor.of_folder(tmp_path, 1) is None
    shutil.copy(folder / "config.json", tmp_path)
    with pytest.raises(ConfigError, match=r"has no preprocessor_config.json"):
        PictureProcessor.of_folder(tmp_path, 1)
