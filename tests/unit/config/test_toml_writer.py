"""A config written as TOML is the same config when it is read."""

import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.config.schema import Config
from asyncrl.config.sources.layers import file_layer
from asyncrl.config.sources.load_config import resolve
from asyncrl.config.toml_writer import dump, value_text
from asyncrl.errors import ConfigError

texts = st.text(st.characters(codec="utf-8"), max_size=30)
plain = st.one_of(st.booleans(), st.integers(-(2**53), 2**53), st.floats(allow_nan=False, allow_infinity=False), texts)
names = st.text(string.ascii_lowercase + '_. -"é', min_size=1, max_size=6)
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3))


configs = st.fixed_dictionaries(
    {
        "seed": st.integers(-5, 2**40),
        "model": st.fixed_dictionaries({"name": texts}),
        "task": st.fixed_dictionaries({"prompts": texts, "system": texts}),
        "generation": st.fixed_dictionaries({"stop": st.lists(texts.filter(bool), max_size=3)}),
        "staleness": st.fixed_dictionaries({"cut_at": st.sampled_from([2, 8, "never", None])}),
        "telemetry": st.fixed_dictionaries({"samples_per_step": st.sampled_from([0, 3, "all"])}),
        "training": st.fixed_dictionaries({"learning_rate": st.floats(0, 1)}),
        "reward": st.fixed_dictionaries(
            {
                "functions": st.lists(
                    st.fixed_dictionaries({"use": texts, "options": st.dictionaries(names, values, max_size=3)}),
                    max_size=3,
                    unique_by=lambda function: str(function["use"]).rpartition(":")[2],  # The name of its term.
                )
            }
        ),
    }
)


@given(values=configs)
def test_configs_come_back(values: dict[str, Any]) -> None:
    config = Config.model_validate(values)
    assert resolve([file_layer(dump(config), "config.toml")]).config == config


def test_notes_say_where_a_value_came_from() -> None:
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}})
    lines = dump(config, {"model.name": "--model.name", "seed": "default"}).splitlines()
    assert 'name = "m"  # --model.name' in lines
    assert "seed = 0  # default" in lines


def test_what_toml_cannot_say_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"reward.functions.*None"):
        value_text({"a": None}, "reward.functions")
