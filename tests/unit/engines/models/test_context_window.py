"""Positions of a model, and what fits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.engines.models.context_window import context_of, context_problems
from asyncrl.tasks.prompt_check import TokenBudget

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

    mistake = TokenBudget(prompt=30, answer=8, context=20).mistake(tokens)
    assert mistake is None if says is None else re.search(says, str(mistake))


def test_without_a_bound_of_the_model_that_of_the_config_holds() -> None:
    assert TokenBudget(prompt=30, answer=8).mistake(30) is None
    assert "task.max_prompt_tokens is 30" in str(TokenBudget(prompt=30, answer=8).mistake(31))


@pytest.mark.parametrize(("answer", "refused"), [(19, False), (20, True), (21, True)])
def test_answers_that_leave_no_room_at_all_are_refused_without_the_model(
    answer: int, refused: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 20}))
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"max_new_tokens": answer}}
    found = "".join(map(str, context_problems(Config.model_validate(values), tmp_path)))
    says = rf"max_new_tokens.*: {answer} new tokens leave no room .* write fewer than 20"
    assert bool(re.search(says, found)) == refused


def test_a_folder_without_a_description_is_left_to_the_services_that_read_it(tmp_path: Path) -> None:
    values = {"model": {"name": "m"}, "task": {"prompts": "p"}, "generation": {"max_new_tokens": 1 << 20}}
    assert not list(context_problems(Config.model_validate(values), tmp_path))
