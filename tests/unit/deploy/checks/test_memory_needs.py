"""Estimated bytes follow the shape of the model and the config."""

import json
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.deploy.checks import memory_needs
from asyncrl.deploy.checks.memory_needs import (
    CHUNK,
    FIRST_CHUNKS,
    PACKAGED,
    PROCESS_BYTES,
    needs,
    shape_of,
    shared_memory,
)
from asyncrl.engines.generation.forward import kv_cache

SMOLLM2 = PACKAGED["pypi:smollm2"]


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, **sections})


def need(name: str, **sections: Any) -> int:
    (found,) = (each.bytes for each in needs(config(**sections), SMOLLM2) if each.name == name)
    return found


def test_parameters_are_those_of_the_real_model() -> None:
    # SmolLM2-135M has 134,515,008 parameters.
    assert SMOLLM2.parameters == 134_515_008


def test_a_model_folder_tells_its_shape(tmp_path: Path) -> None:
    described = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert shape_of(str(tmp_path)) == SMOLLM2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    assert shape_of(str(tmp_path)) is None
    assert shape_of("someone/their-model") is None
    assert shape_of("warmed:reverse") is not None


def test_needs_grow_with_what_causes_them() -> None:
    assert need("generation", generation={"slots": 64}) > need("generation", generation={"slots": 32})
    assert need("generation", generation={"replicas": 2}) == 2 * need("generation")
    rounded = {"name": "m", "dtype": "bfloat16"}
    head = need("generation", model={**rounded, "float32_head": True}) - need("generation", model=rounded)
    assert head == 49152 * 576 * 4
    assert need("training", training={"gradient_checkpointing": True}) < need("training")
    assert need("training") > SMOLLM2.parameters * 16
    names = [each.name for each in needs(config(algorithm={"kl": 0.1}, evaluate={"prompts": "h"}), SMOLLM2)]
    assert names == ["generation", "training", "reward", "reference", "evaluation"]


def test_a_critic_takes_what_a_trainer_does_but_for_logits_and_weights_to_publish() -> None:
    ppo = {"algorithm": {"preset": "ppo"}}
    assert SMOLLM2.parameters * 16 < need("critic", **ppo) < need("training", **ppo)
    assert "critic" not in [each.name for each in needs(config(), SMOLLM2)]
    assert shared_memory(config(**ppo), SMOLLM2) - shared_memory(config(), SMOLLM2) == 28 * 8 * 576 * 4


def test_models_that_judge_are_counted(tmp_path: Path) -> None:
    """A frozen one by its weights, as large as the policy where it cannot be looked at; a cost critic as a critic."""
    weights = SMOLLM2.parameters * 4
    assert need("reward", reward={"model": "someone/theirs"}) - need("reward") == weights
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    small = dict(zip(sizes, (50, 32, 2, 48, 4), strict=True))
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert (
        need("reward", reward={"model": str(tmp_path)}) - need("reward") == memory_needs.Shape.of(small).parameters * 4
    )
    safe = {"algorithm": {"preset": "safe_rlhf"}, "cost": {"model": "someone/theirs", "limit": 1}}
    found = {each.name: each for each in needs(config(**safe), SMOLLM2)}
    assert (found["cost"].least, found["cost"].device) == (weights, "cpu")
    assert found["cost_critic"].bytes == found["critic"].bytes
    two = shared_memory(config(**safe), SMOLLM2) - shared_memory(config(), SMOLLM2)
    assert two == 2 * 28 * 8 * 576 * 4


def test_the_cache_lies_between_its_first_chunks_and_whole_slots() -> None:
    (found,) = (each for each in needs(config(generation={"slots": 10}), SMOLLM2) if each.name == "generation")
    weights, chunk = SMOLLM2.parameters * 4, CHUNK * SMOLLM2.cache_bytes_per_token
    assert found.least == weights + 10 * 2 * chunk
    assert found.bytes == PROCESS_BYTES + weights + 10 * (512 + 64) // 32 * chunk
    assert (CHUNK, FIRST_CHUNKS) == (kv_cache.KV_BLOCK, kv_cache.FIRST_BLOCKS)


def test_shared_memory_holds_two_versions_and_the_rows_in_flight() -> None:
    weights = 2 * SMOLLM2.parameters * 4
    assert shared_memory(config(fleet={"wire": "tcp"}), SMOLLM2) == weights
    # (eta + 1) B + ceil(slots / G) = 3 * 8 + 4 groups of 8 samples of 576 tokens of 16 bytes
    assert shared_memory(config(), SMOLLM2) == weights + 28 * 8 * 576 * 16
