"""Which keys there are, and which one somebody meant."""

import re

import pytest

from asyncrl.config.install_hints import program
from asyncrl.config.sources import load
from asyncrl.config.sources.keys import (
    REMARKS,
    TRANSLATIONS,
    UNSUPPORTED,
    advice,
    all_keys,
    closest_key,
    keys_with_tables,
    sections,
    table_keys,
    tables,
    translate,
)
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


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("num_generations", "task.samples_per_prompt"),
        ("beta", "algorithm.kl"),
        ("max_completion_length", "generation.max_new_tokens"),
        ("epsilon_high", "algorithm.clip_high"),
        ("per_device_train_batch_size", "training.micro_batch_tokens"),
        ("actor_rollout_ref.rollout.n", "task.samples_per_prompt"),
        ("actor_rollout_ref.actor.optim.lr", "training.learning_rate"),
        ("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl"),
        ("data.train_batch_size", "task.prompts_per_step"),
        ("rollout_batch_size", "task.prompts_per_step"),
        ("trainer.total_epochs", "task.epochs"),
        ("num_train_epochs", "task.epochs"),
        ("training.num_train_epochs", "task.epochs"),
    ],
)
def test_names_of_other_trainers(theirs: str, ours: str) -> None:
    translated = translate(theirs)
    assert translated is not None
    assert translated[0] == ours
    assert f"write {ours}" in advice(theirs)


ROLES = {"actor_rollout_ref.ref": "reference", "critic": "critic", "reward_model": "reward"}
"""Sections by the names of models beside the policy in verl."""


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ("actor_rollout_ref.actor.ulysses_sequence_parallel_size", "write training.layout (layout = { sp = N })"),
        ("actor.fsdp_config.ulysses_sequence_parallel_size", "write training.layout (layout = { sp = N })"),
        ("actor.megatron.context_parallel_size", "write training.layout (layout = { sp = N }, by Ulysses)"),
        ("actor.megatron.pipeline_model_parallel_size", "write training.layout (layout = { pp = N })"),
        ("actor.megatron.expert_model_parallel_size", "write training.layout (layout = { ep = N })"),
        ("actor.veomni.expert_parallel_size", "write training.layout (layout = { ep = N })"),
        ("actor_rollout_ref.actor.megatron.tensor_model_parallel_size", "write training.layout (layout = { tp = N })"),
        ("actor.fsdp_config.fsdp_size", "write training.layout (layout = { shard = N }, and dp = M for M copies)"),
        ("actor.fsdp_config.optimizer_offload", 'write training.deepspeed (engine = "deepspeed" with'),
        ("actor.fsdp_config.param_offload", "not supported: weights stay on training.device"),
        ("actor_rollout_ref.hybrid_engine", 'write generation.colocate (true is colocate = "training"'),
        ("rollout.tensor_model_parallel_size", "write generation.layout_tp (with vLLM;"),
        ("rollout.data_parallel_size", "write generation.replicas"),
        ("rollout.pipeline_model_parallel_size", "write generation.layout (layout = { pp = N }, where the trainer"),
        ("rollout.expert_parallel_size", "not supported: a replica holds all experts"),
        ("training.layout_tp", "write training.layout (a table: layout = { tp = N })"),
        ("training.layout_pp", "write training.layout (a table: layout = { pp = N })"),
        ("deepspeed", 'write training.deepspeed (with engine = "deepspeed"'),
        *((f"{role}.megatron.tensor_model_parallel_size", f"write {ours}.layout (") for role, ours in ROLES.items()),
        *((f"{role}.fsdp_config.fsdp_size", f"write {ours}.layout (layout = {{ shard") for role, ours in ROLES.items()),
        ("critic.model.fsdp_config.fsdp_size", "write critic.layout (layout = { shard = N }"),
        ("critic.model.path", "write critic.model"),
        *((f"{role}.fsdp_config.param_offload", f"stay on {ours}.device") for role, ours in ROLES.items()),
        ("critic.model.fsdp_config.optimizer_offload", "not supported: moments stay on critic.device"),
        *(
            (f"{role}.{name}", f"not supported: {what} of the trainer; write {ours}.layout = {{")
            for role, ours in ROLES.items()
            for name, what in (
                ("ulysses_sequence_parallel_size", "slices of rows are"),
                ("megatron.context_parallel_size", "slices of rows are"),
                ("megatron.pipeline_model_parallel_size", "stages are"),
                ("megatron.expert_model_parallel_size", "shares of experts are"),
            )
        ),
    ],
)
def test_sizes_of_groups_of_ranks_are_those_of_the_layout_of_their_model(theirs: str, says: str) -> None:
    assert says in advice(theirs)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("training.lerning_rate", "training.learning_rate"),
        ("learning_rate", "training.learning_rate"),
        ("training.temperature", "generation.temperature"),
        ("evaluation.temperature", "evaluate.temperature"),
        ("stalenes.limit", "staleness.limit"),
        ("stpes", "steps"),
        ("algorithm.clip", "algorithm.clip_low"),
    ],
)
def test_the_closest_key(typed: str, meant: str) -> None:
    assert closest_key(typed) == meant
    assert meant in advice(typed)


def test_a_name_like_nothing_gets_the_list() -> None:
    assert advice("zzzzqqq") == f"`{program()} keys` lists all"


def test_what_is_left_out_on_purpose_is_said() -> None:
    assert "behaviour" in advice("actor_rollout_ref.rollout.repetition_penalty")
    golden.says(advice("actor_rollout_ref.rollout.top_k"), "generation.top_k", "-1")


def test_a_misspelt_foreign_name_is_recognised() -> None:
    assert "algorithm.clip_low" in advice("epsilom")


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


@pytest.mark.parametrize("critic", ["critic", "cost_critic"])
def test_several_critics_are_refused_with_the_reason(critic: str) -> None:
    says = rf"--{critic}\.replicas: not supported: there is one critic: each of several would learn other values"
    with pytest.raises(ConfigError, match=says):
        load("quickstart", (f"--{critic}.replicas", "2"), {})


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


def test_a_key_of_a_table_that_is_written_as_a_key_is_explained() -> None:
    with golden.raises(ConfigError, match=r"reward\.functions\.weight.*reward\.functions"):
        load("quickstart", ["--reward.functions.weight", "2"])


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_asyncrl_does_not_do_is_not_supported(name: str) -> None:
    assert name not in all_keys()
    with pytest.raises(ConfigError) as refused:
        load("quickstart", [f"--{name}", "1"])
    assert f": not supported: {UNSUPPORTED[name]}" in str(refused.value)
    assert "no such key" not in str(refused.value)


@pytest.mark.parametrize("typed", ["task.sort", "evaluate.holdout", "task.holdout", "evaluate.held_out"])
def test_a_name_that_is_no_misspelling_gets_no_key(typed: str) -> None:
    assert closest_key(typed) is None
    assert "FILE.py:NAME" in advice(typed)
    assert "did you mean" not in advice(typed)


def test_a_key_of_tables_in_the_same_section_is_meant_before_one_of_another_section() -> None:
    golden.says(advice("evaluate.functions"), "mean evaluate.sets.NAME.functions?")
    assert closest_key("task.weight") == "task.prompts.weight"


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
