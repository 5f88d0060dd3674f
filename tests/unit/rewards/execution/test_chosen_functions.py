"""Groups are named in errors as a person knows them: by their number, or by the prompt of a held-out set."""

import pytest

from asyncrl.config.schema import Config
from asyncrl.rewards.execution.scoring import FunctionChoice
from asyncrl.rewards.functions import FunctionSpec


@pytest.mark.parametrize(
    ("group", "place", "members", "own"),
    [
        (0, "group 0", 4, False),
        (7, "group 7", 4, False),
        (-1, "held-out prompt 0", 3, False),
        (-2, "held-out prompt 1", 3, False),
        (-3, "held-out prompt 0 of evaluate.sets.hard", 5, True),
    ],
)
def test_the_first_group_is_of_the_run_and_negative_ones_of_held_out_sets(
    group: int, place: str, members: int, own: bool
) -> None:
    hard = {"hard": {"prompts": "hard.jsonl", "samples": 5}}
    held = {"prompts": "held.jsonl", "size": 2, "samples": 3, "temperature": 1.0, "sets": hard}
    sections = {"model": {"name": "m"}, "task": {"prompts": "p", "samples_per_prompt": 4}, "evaluate": held}
    spec = FunctionSpec("numeric", "numeric")
    choice = FunctionChoice.of(Config.model_validate(sections), [spec], {"hard": [spec]})
    assert (choice.place(group), choice.members(group), choice.of_group(group).is_own) == (place, members, own)
