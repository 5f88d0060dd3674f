"""Rules about what a run shows of itself."""

from typing import Any

import pytest

from asyncrl.config.schema import Config

RANKS = {"use": "mine.py:ranks", "group": True}
"""A function that scores whole groups."""


@pytest.mark.parametrize(
    ("functions", "evaluate", "says"),
    [
        ([RANKS], {"prompts": "p"}, ["evaluate.samples: ranks scores groups"]),
        ([RANKS], {"prompts": "p", "samples": 4, "temperature": 1.0}, []),
        ([RANKS], {}, []),
        (["numeric"], {"prompts": "p"}, []),
        ([RANKS], {"sets": {"hard": {"prompts": "p"}}}, ["evaluate.sets.hard.samples = 8 with a temperature over 0"]),
        ([RANKS], {"sets": {"hard": {"prompts": "p", "functions": ["exact_match"]}}}, []),
        (["numeric"], {"sets": {"hard": {"prompts": "p", "functions": [RANKS]}}}, ["evaluate.sets: ranks scores"]),
    ],
)
def test_functions_of_groups_want_held_out_groups(
    functions: list[Any], evaluate: dict[str, Any], says: list[str]
) -> None:
    sections = {"model": {"name": "m"}, "task": {"prompts": "p.jsonl"}, "evaluate": evaluate}
    config = Config.model_validate({**sections, "reward": {"functions": functions}})
    found = [str(each) for each in config.warnings]
    assert len(found) == len(says)
    assert all(part in line and 'functions = ["exact_match"]' in line for part, line in zip(says, found, strict=True))
