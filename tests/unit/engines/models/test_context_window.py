"""Positions of a model, and what fits."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config import Config
from asyncrl.context import Room, context_of, refuse_without_context
from asyncrl.errors import ConfigError

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 100}


@pytest.mark.parametrize(
    ("shape", "positions"),
    [
        ({"max_position_embeddings": 100}, 100),
        ({"n_positions": 70}, 70),
        ({}, None),
        ({"max_position_embeddings": None}, None),
        ({"text_config": {"max_position_embeddings": 30}, "max_position_embeddings": 9}, 30),
        ({"max_position_embeddings": 100, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 100),
        ({"max_position_embeddings": 100, "rope_scaling": {"type": "linear", "factor": 2}}, 200),
        ({"max_position_embeddings": 100, "rope_parameters": YARN}, 400),
        ({"max_position_embeddings": 500, "rope_parameters": YARN}, 500),
        ({"max_position_embeddings": 800, "rope_scaling": {**YARN, "rope_type": "llama3", "factor": 32}}, 800),
    ],
)
def test_positions_are_those_of_the_config_and_of_its_scaling(shape: dict[str, Any], positions: int | None) -> None:
    assert context_of(shape) == positions


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        (0, "the prompt has no tokens"),
        (1, None),
        (12, None),
        (13, r"13 tokens, and with generation.max_new_tokens = 8 .* beyond the 20 positions .* max_new_tokens = 7$"),
        (20, r"beyond the 20 positions .*: shorten it$"),
        (40, r"beyond the 20 positions .*: shorten it$"),
    ],
)
def test_a_prompt_needs_room_for_its_answer(tokens: int, says: str | None) -> None:
    import re

    mistake = Room(prompt=30, answer=8, context=20).mistake(tokens)
    assert mistake is None if says is None else re.search(says, str(mistake))


def test_without_a_bound_of_the_model_that_of_the_config_holds() -> None:
    assert Room(prompt=30, answer=8).mistake(30) is None
    assert "task.max_prompt_tokens is 30" in str(Room(prompt=30, answer=8).mistake(31))


@pytest.mark.parametrize(("answer", "refused"), [(19, False), (20, True), (21, True)])
def test_answers_that_leave_no_room_at_all_are_refused_without_the_model(
    answer: int, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 20}))
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"max_new_tokens": answer}}
    if refused:
        with pytest.raises(ConfigError, match=rf"max_new_tokens = {answer} leaves no room .* write fewer than 20"):
            refuse_without_context(Config.model_validate(values), tmp_path)
    else:
        refuse_without_context(Config.model_validate(values), tmp_path)


def test_a_folder_without_a_description_is_left_to_the_services_that_read_it(tmp_path: Path) -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"max_new_tokens": 1 << 20}}
    refuse_without_context(Config.model_validate(values), tmp_path)
