"""Which keys there are, and which one somebody meant."""

import re

import pytest

from asyncrl.config.sources import load
from asyncrl.config.sources.keys import (
    REMARKS,
    TRANSLATIONS,
    all_keys,
    keys_with_tables,
    sections,
    table_keys,
    tables,
)
from asyncrl.config.sources.layers import flags_layer
from asyncrl.deploy.commands.keys import main as keys_command
from asyncrl.errors import ConfigError
from tests import golden


def test_every_key_of_every_section_is_there() -> None:
    assert {"seed", "steps", "task.samples_per_prompt", "staleness.limit", "fleet.wire"} <= set(all_keys())
    assert all_keys()["staleness.cut_at"].type == "int > 0 | never | none"
    assert all_keys()["model.name"].required
    assert all_keys()["training.learning_rate"].default == 1e-6
    assert "versions" in all_keys()["staleness.limit"].doc
    assert {name.split(".")[0] for name in all_keys() if "." in name} == set(sections())


def test_every_foreign_name_leads_to_a_key() -> None:
    assert set(TRANSLATIONS.values()) <= set(all_keys())
    assert all(REMARKS.values())


@pytest.mark.parametrize("typed", golden.cases(__file__, "test_a_misspelt_key"), ids=str)
def test_a_misspelt_key(typed: str) -> None:
    """The closest key is named, where one is near."""
    (problem,) = flags_layer((f"--{typed}", "1")).problems
    golden.says(problem)


@pytest.mark.trap("restricted_sampling")
@pytest.mark.parametrize(
    "name",
    [
        *("typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("no_repeat_ngram_size", "logit_bias", "bad_words", "bad_words_ids", "allowed_token_ids", "min_tokens"),
    ],
)
def test_what_would_change_the_distribution_unseen_is_no_key_and_says_why(name: str) -> None:
    assert not [key for key in all_keys() if key.rsplit(".", 1)[-1] == name]
    with pytest.raises(ConfigError, match=rf"generation\.{name}.*behaviour log-probabilities"):
        load("quickstart", (f"--generation.{name}", "1"), {})


@pytest.mark.trap("greedy_training")
def test_training_at_temperature_0_is_refused_and_evaluation_at_0_is_not() -> None:
    with golden.raises(ConfigError, match=r"generation\.temperature.*0"):
        load("quickstart", ("--generation.temperature", "0"), {})
    assert load("quickstart", ("--evaluate.temperature", "0"), {}).config.evaluate.temperature == 0


@pytest.mark.trap("raw_logprobs")
def test_an_engine_whose_log_probs_nobody_has_compared_is_refused() -> None:
    with golden.raises(ConfigError, match="'torch'.*'vllm'"):
        load("quickstart", ("--generation.engine", "sglang"), {})
    with pytest.raises(ConfigError, match=r'write generation.engine \(engine = "vllm"'):
        load("quickstart", ("--generation.use_vllm", "true"), {})


def test_keys_of_tables_are_described() -> None:
    """Every table that is a value, at any depth: each of its keys has a type and a sentence."""
    known = {"reward.functions", "cost.functions", "model.lora", "pools.NAME", "task.prompts", "evaluate.sets.NAME"}
    assert known <= set(tables()), "a list, a table, one by name, an entry beside texts, one in one"
    assert "evaluate.sets.NAME.functions.use" in table_keys()
    assert table_keys()["reward.functions.use"].required
    assert table_keys()["model.lora.rank"].default == 16
    for key in table_keys().values():
        assert re.fullmatch(r"[A-Z`].*\.", key.doc), key.name
        assert key.type
    names = [key.name for key in keys_with_tables()]
    assert names.index("reward.functions") + 1 == names.index("reward.functions.use")
    assert set(names) == {*all_keys(), *table_keys()}


@pytest.mark.parametrize(
    ("word", "names"),
    [
        ("pretrain", ["model.name", "algorithm.pretrain_coefficient", "task.pretrain", "task.pretrain_per_step"]),
        ("num_generations", ["task.samples_per_prompt"]),
    ],
)
def test_a_word_finds_the_key_of_other_trainers_and_those_with_the_word(
    word: str, names: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert keys_command([word]) == 0
    printed = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line and line[0] != " "]
    assert printed[0] == names[0]
    assert sorted(printed[1:]) == sorted(names[1:])
