"""Estimated bytes follow the shape of the model and the config."""

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from asyncrl.config.gate_config import GateConfig
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.memory_needs import (
    GPU_PROCESS_BYTES,
    PROCESS_BYTES,
    TEXT_BYTES_PER_TOKEN,
    MemoryNeed,
    SharedMemoryNeed,
    longest_token_of,
    needs,
    planned_workers,
    shared_memory,
)
from asyncrl.deploy.checks.run_prompts import RowLengths, measured_lengths
from asyncrl.deploy.checks.worker_memory import BYTES_PER_SAMPLED, CHUNK
from asyncrl.engines.generation import block_pool
from asyncrl.engines.models.model_shape import PACKAGED, Shape, shape_of
from asyncrl.lanes.data.row_store import LEAST_GROWTH, RowStore, bytes_of_row, range_bytes
from asyncrl.protocols.batch import reference_columns, sample_columns, token_reward_columns, value_columns

SMOLLM2 = PACKAGED["pypi:smollm2"]


def config(**sections: Any) -> Config:
    return Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, **sections})


def need_of(wanted: Config, name: str) -> MemoryNeed:
    (found,) = (each for each in needs(wanted, SMOLLM2) if each.name == name)
    return found


def need(name: str, **sections: Any) -> int:
    return need_of(config(**sections), name).bytes


def test_a_model_folder_tells_its_shape(tmp_path: Path) -> None:
    """SmolLM2-135M has 134,515,008 parameters."""
    assert SMOLLM2.parameters == 134_515_008
    described = {
        "vocab_size": 49152,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "model_type": "llama",
    }
    (tmp_path / "config.json").write_text(json.dumps(described))
    assert shape_of(str(tmp_path)) == SMOLLM2
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "strange"}))
    assert shape_of(str(tmp_path)) is None
    assert shape_of("someone/their-model") is None
    assert shape_of("warmed:reverse") is not None


def test_ranks_that_share_out_the_weights_hold_a_part_each_and_gather_a_layer_at_a_time() -> None:
    """Embedding and last norm are gathered for the whole pass, two layers at once, their gradients with them."""
    layer = 576 * (2 * 576 + 2 * 192 + 3 * 1536) + 2 * 576
    outside = 49152 * 576 + 576
    parts = {"whole": _training_parts(1), "shards": _training_parts(4)}
    for name in ("weights", "gradients", "optimizer"):
        assert parts["shards"][name] == parts["whole"][name] // 4
    assert "gathered" not in parts["whole"]
    assert parts["shards"]["gathered"] == 4 * 2 * (outside + 2 * layer)
    assert _training_parts(1, tp=2)["weights"] == 4 * (outside + 30 * ((layer - 2 * 576) // 2 + 2 * 576))


def test_ranks_of_a_critic_count_like_those_of_the_trainer() -> None:
    wanted = config(algorithm={"preset": "ppo"}, critic={"layout": {"shard": 2, "dp": 2}})
    found = need_of(wanted, "critic")
    assert found.parts["weights"] == _training_parts(2)["weights"]
    assert found.bytes == 4 * sum(found.parts.values())
    workers = [each for each in planned_workers(wanted, SMOLLM2) if each.need.name == "critic"]
    assert [each.name for each in workers] == ["critic0.0", "critic0.1", "critic0.2", "critic0.3"]
    assert [each.bytes for each in workers] == 4 * [sum(found.parts.values())]


def test_ranks_of_frozen_models_hold_their_parts_and_gather_without_gradients() -> None:
    sections = {"algorithm": {"kl": 0.1}, "reference": {"replicas": 2, "layout": {"shard": 2}}}
    wanted = config(**sections, reward={"model": "m", "layout": {"tp": 2}})
    reference, reward = (need_of(wanted, name) for name in ("reference", "reward"))
    assert reference.parts["weights"] == _training_parts(2)["weights"]
    assert reference.parts["gathered"] == _training_parts(2)["gathered"] // 2
    assert reference.bytes == 4 * sum(reference.parts.values())
    assert reward.least == 2 * _training_parts(1, tp=2)["weights"]
    names = [each.name for each in planned_workers(wanted, SMOLLM2)]
    assert {"reference0.0", "reference0.1", "reference1.0", "reference1.1", "reward0.0", "reward0.1"} <= set(names)


def test_pipeline_stages_hold_some_of_the_layers_and_buffers_for_what_they_pass_on() -> None:
    """The embedding is the head too: both ends have it. The parts are those of the largest stage, here the first."""
    layer = 576 * (2 * 576 + 2 * 192 + 3 * 1536) + 2 * 576
    sections = {"training": {"layout": {"pp": 2}, "micro_batch_tokens": 4096}}
    whole = need_of(config(training={"micro_batch_tokens": 4096}), "training")
    found = need_of(config(**sections), "training")
    assert found.parts["weights"] == 4 * (49152 * 576 + 15 * layer)
    assert found.least == whole.least + 16 * 49152 * 576
    assert found.parts["buffers of stages"] // (4 * 576) % 4096 == 0
    assert SMOLLM2.stage(0, 4).layers + SMOLLM2.stage(3, 4).layers == 8 + 7


def test_tensor_ranks_share_out_what_is_inside_of_layers() -> None:
    """Per token and layer: two norms stay whole, attention and feed-forward layers are halved. The logits are more than
    what a layer takes backward, and stay whole too."""
    one, two = (_training_parts(1, tp=tp)["activations"] for tp in (1, 2))
    inside = 2 * 576 + 2 * 192 + 4 * 1536
    tokens, odd = divmod(one - two, 4 * 30 * inside // 2)
    assert (tokens > 0, odd) == (True, 0)


def test_ranks_with_slices_of_rows_hold_all_weights_and_their_share_of_activations() -> None:
    long = {"micro_batch_tokens": 32768, "logits_chunk": 256}
    whole = _training_parts(1, **long)
    found = _training_parts(1, sp=2, **long)
    for name in ("weights", "gradients", "optimizer"):
        assert found[name] == whole[name]
    assert 0.45 < found["activations"] / whole["activations"] < 0.6


def test_ranks_share_out_experts_and_hold_all_other_weights() -> None:
    """Qwen3-30B-A3B's numbers, with fewer layers and tokens: 128 experts of 768, of which a token has 8."""
    sizes = {"vocab_size": 1000, "hidden_size": 2048, "num_hidden_layers": 4, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 4, "head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128}
    shape = Shape.of({**sizes, "intermediate_size": 6144, "num_experts_per_tok": 8, "model_type": "qwen3_moe"})
    assert SMOLLM2.chosen == 0
    experts = 4 * 128 * 3 * 2048 * 768
    wanted = {"micro_batch_tokens": 4096}
    parts = {}
    for axis in ("dp", "ep"):
        chosen = config(training={"layout": {axis: 4}, **wanted})
        parts[axis] = next(dict(each.parts) for each in needs(chosen, shape) if each.name == "training")
    for name, numbers in (("weights", 1), ("gradients", 1), ("optimizer", 2)):
        assert parts["dp"][name] - parts["ep"][name] == 4 * numbers * experts * 3 // 4
    gradient = 4 * 128 * 2 * 768 * 2048
    assert parts["dp"]["activations"] - parts["ep"]["activations"] == gradient * 3 // 4


def _training_parts(shard: int, tp: int = 1, sp: int = 1, **training: int) -> dict[str, int]:
    wanted = config(training={"layout": {"shard": shard, "tp": tp, "sp": sp}, **training})
    return dict(need_of(wanted, "training").parts)


def test_needs_grow_with_what_causes_them() -> None:
    assert need("generation", generation={"slots": 64}) > need("generation", generation={"slots": 32})
    assert need("generation", generation={"replicas": 2}) == 2 * need("generation")
    assert need("reward", reward={"replicas": 3}) == 3 * need("reward")
    held_out = {"prompts": "h", "replicas": 2}
    assert need("evaluation", evaluate=held_out) == 2 * need("evaluation", evaluate={"prompts": "h"})
    rounded = {"name": "m", "dtype": "bfloat16"}
    head = need("generation", model={**rounded, "float32_head": True}) - need("generation", model=rounded)
    assert head == 49152 * 576 * 4
    assert need("training", training={"gradient_checkpointing": True}) < need("training")
    assert need("training") > SMOLLM2.parameters * 16
    names = [each.name for each in needs(config(algorithm={"kl": 0.1}, evaluate={"prompts": "h"}), SMOLLM2)]
    assert names == ["generation", "training", "reward", "reference", "evaluation", "copies for checkpoints"]


def test_a_checkpoint_that_is_written_beside_steps_takes_weights_and_moments_once_more() -> None:
    copies = "copies for checkpoints"
    assert need(copies) == SMOLLM2.parameters * 12
    assert need(copies, algorithm={"preset": "ppo"}) == 2 * need(copies)
    assert need(copies, training={"optimizer": "sgd"}) == SMOLLM2.parameters * 4
    assert need(copies, model={"name": "m", "lora": {"rank": 4}}) < 0.01 * need(copies)
    waiting = config(training={"background_checkpoints": False})
    assert copies not in [each.name for each in needs(waiting, SMOLLM2)]


def test_a_critic_takes_what_a_trainer_does_but_for_logits_and_weights_to_publish() -> None:
    ppo = {"algorithm": {"preset": "ppo"}}
    assert SMOLLM2.parameters * 16 < need("critic", **ppo) < need("training", **ppo)
    assert "critic" not in [each.name for each in needs(config(), SMOLLM2)]
    values = KEPT * range_bytes(64 * 4 + 8 + 5 * 8)
    assert values < rows(**ppo) - rows() < values + LEAST_GROWTH


def test_models_that_judge_are_counted(tmp_path: Path) -> None:
    """A frozen one by its weights, as large as the policy where it cannot be looked at; a cost critic as a critic."""
    weights = SMOLLM2.parameters * 4
    assert need("reward", reward={"model": "someone/theirs"}) == PROCESS_BYTES + weights
    sizes = ("vocab_size", "hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads")
    small = dict(zip(sizes, (50, 32, 2, 48, 4), strict=True))
    (tmp_path / "config.json").write_text(json.dumps(small))
    assert need("reward", reward={"model": str(tmp_path)}) - PROCESS_BYTES == Shape.of(small).parameters * 4
    safe = {"algorithm": {"preset": "safe_rlhf"}, "cost": {"model": "someone/theirs", "limit": 1}}
    found = {each.name: each for each in needs(config(**safe), SMOLLM2)}
    assert (found["cost"].least, found["cost"].device) == (weights, "cpu")
    assert found["cost_critic"].bytes == found["critic"].bytes
    assert rows(**safe) - rows() == 2 * (rows(algorithm={"preset": "ppo"}) - rows())


def test_the_cache_takes_what_is_used_and_on_a_device_all_of_it_at_once() -> None:
    def need(**generation: Any) -> MemoryNeed:
        return need_of(config(generation={"slots": 10, **generation}), "generation")

    sampled = 10 * 64 * BYTES_PER_SAMPLED
    weights = SMOLLM2.parameters * 4 + sampled
    chunk = CHUNK * SMOLLM2.cache_bytes_per_token
    whole = 10 * (512 + 64) // 32 * chunk
    assert (need().least, need().bytes) == (weights, PROCESS_BYTES + weights + whole)
    assert need(device="cuda").least == weights + whole
    assert whole > 10**8
    assert need(device="cuda", cache_gb=0.1).least == weights + 10**8
    assert need(cache_gb=0.1).bytes == PROCESS_BYTES + weights + 10**8
    assert need(deterministic=True).least == weights + whole
    assert CHUNK == block_pool.KV_BLOCK


def test_vllm_makes_its_cache_at_the_start() -> None:
    """577 tokens are five blocks of 128."""

    def need(layout_tp: int = 1, **options: int) -> MemoryNeed:
        chosen = config(generation={"slots": 10, "engine": "vllm", "layout_tp": layout_tp, "vllm": options})
        return need_of(chosen, "generation")

    weights = SMOLLM2.parameters * 4
    cache = (12 * 5 + 1) * 128 * SMOLLM2.cache_bytes_per_token
    assert (need().least, need().bytes) == (weights + cache, 2 * GPU_PROCESS_BYTES + weights + cache)
    assert need(kv_cache_memory_bytes=1000).least == weights + 1000
    assert need(layout_tp=2).bytes == need().bytes + GPU_PROCESS_BYTES


# ---- shared memory ---------------------------------------------------------------------------------------------------

KEPT = (28 + 8) * 8
"""(eta + 1) B + ceil(slots / G) = 3 * 8 + 4 groups of 8 samples in flight, and B whose release is under way."""


def rows(**sections: Any) -> int:
    return shared_memory(config(**sections), SMOLLM2).rows


def within_a_tenth(estimate: float, real: float) -> bool:
    return 0.9 < estimate / real < 1.1


def test_shared_memory_holds_two_versions_and_the_rows_in_flight() -> None:
    weights = 2 * SMOLLM2.parameters * 4
    assert shared_memory(config(fleet={"wire": "tcp"}), SMOLLM2) == SharedMemoryNeed(weights, 0, 0)
    assert shared_memory(config(fleet={"wire": "inproc"}), SMOLLM2) == SharedMemoryNeed(0, 0, 0)
    need = shared_memory(config(), SMOLLM2, longest_token=100)
    assert need.weights == weights
    tokens = 512 * 4 + 64 * 12
    text = 64 * 4
    table = 8 * 11
    assert within_a_tenth(need.rows, KEPT * (tokens + text + table))
    assert within_a_tenth(need.worst_rows, KEPT * (tokens + 64 * 100 + table))


def test_what_is_not_sampled_takes_no_memory_however_long_a_token_may_be() -> None:
    """Eight replicas with answers of 8k tokens: text took 102 GB when each row had the room of the longest one."""
    long = config(generation={"replicas": 8, "max_new_tokens": 8192, "slots": 256}, task={"prompts": "p"})
    need = shared_memory(long, SMOLLM2, longest_token=513)
    kept = (3 * 8 + 256 + 8) * 8
    assert within_a_tenth(need.rows, kept * (8192 * 16 + 512 * 4))
    assert need.worst_rows < 11e9


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {
            "generation": {"replicas": 2, "max_new_tokens": 300},
            "algorithm": {"preset": "ppo", "kl": 0.05},
            "reference": {"replicas": 2},
        },
        {
            "generation": {"max_new_tokens": 400},
            "algorithm": {"preset": "ppo"},
            "reward": {"functions": [{"use": "mine.py:by_token", "by_token": True}]},
        },
    ],
)
def test_the_estimate_is_right_within_a_tenth_of_what_full_stores_take(sections: dict[str, Any]) -> None:
    """Opens the stores as the services do, for the longest token that there may be, and fills them with full rows."""
    chosen = config(**sections)
    gate = GateConfig.of(chosen)
    response = chosen.generation.max_new_tokens
    prompt = chosen.task.max_prompt_tokens
    columns = [(sample_columns(prompt, response, 4 * response), chosen.generation.replicas)]
    if chosen.algorithm.kl > 0:
        columns.append((reference_columns(response), chosen.reference.replicas))
    if chosen.algorithm.advantage == "gae":
        columns.append((value_columns("values", "valued_at", response), 1))
    if any(function.by_token for function in chosen.reward.functions):
        columns.append((token_reward_columns(response), 1))
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder, ExitStack() as scope:
        for kind, (each, replicas) in enumerate(columns):
            row = {name: np.ones(length, dtype) for name, (dtype, length) in each.items()}
            longest = bytes_of_row(each) + 500 * response
            stores = [
                RowStore.shared(f"asyncrl-a-1-w{kind}.{number}.rows", gate.row_slots, longest, Path(folder))
                for number in range(replicas)
            ]
            for number, store in enumerate(stores):
                scope.callback(store.close)
                for _ in range(number, gate.kept, replicas):
                    store.put(row)
        taken = sum(512 * path.stat().st_blocks for path in Path(folder).iterdir())
        assert within_a_tenth(shared_memory(chosen, SMOLLM2).rows, taken)


def test_the_longest_token_is_read_from_the_tokenizer(tmp_path: Path) -> None:
    assert longest_token_of(str(tmp_path)) == TEXT_BYTES_PER_TOKEN
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "\u00e4" * 50: 1}}}))
    assert longest_token_of(str(tmp_path)) == 101
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": [["abcdef", -1.0], ["b", -2.0]]}}))
    assert longest_token_of(str(tmp_path)) == 7


LORA = {"name": "m", "lora": {"rank": 16}}
Q_AND_V = {"name": "m", "lora": {"rank": 8, "targets": ["q_proj", "v_proj"]}}


def test_adapters_alone_have_gradient_moments_and_versions() -> None:
    # Rank 16, in and out of seven layers of 30 blocks: 4,884,480 parameters.
    adapters = 30 * 16 * (2 * 1152 + 2 * 768 + 3 * 2112)
    full, lora = ({each.name: each for each in needs(config(**more), SMOLLM2)} for more in ({}, {"model": LORA}))
    assert full["training"].least == 16 * SMOLLM2.parameters
    assert lora["training"].least == 4 * SMOLLM2.parameters + 16 * adapters
    assert lora["training"].least < 0.4 * full["training"].least
    assert lora["generation"].least - full["generation"].least == 4 * adapters
    assert shared_memory(config(model=LORA), SMOLLM2).weights == 2 * 4 * adapters


def test_targets_of_adapters_count() -> None:
    weights = shared_memory(config(model=Q_AND_V), SMOLLM2).weights
    assert weights == 2 * 4 * 30 * 8 * (576 + 576 + 576 + 192)


def test_a_reference_takes_no_memory_beside_adapters_unless_a_critic_reads_it() -> None:
    def names(**sections: Any) -> set[str]:
        return {each.name for each in needs(config(**sections), SMOLLM2)}

    kl = {"kl": 0.1}
    assert "reference" in names(algorithm=kl)
    assert "reference" not in names(algorithm=kl, model=LORA)
    assert "reference" in names(algorithm={"preset": "ppo", **kl}, model=LORA)
    rows = [shared_memory(config(algorithm=kl, **more), SMOLLM2).rows for more in ({}, {"model": LORA})]
    assert rows[0] > rows[1]


# ---- lengths of prompts ----------------------------------------------------------------------------------------------


def test_prompts_are_counted_where_they_and_the_model_are_here(tmp_path: Path) -> None:
    """Rows of 2 and of 40 letters, with a tokenizer of letters; a template puts three letters around each message."""
    letters = {"<eos>": 0, **{letter: number for number, letter in enumerate("abc<>|", 1)}}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.content }}|>{% endfor %}")
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a" * (40 if row % 2 else 2)}) + "\n" for row in range(10)))
    task = {"prompts": str(path)}
    assert measured_lengths(config(task=task), str(tmp_path)) == RowLengths(21, 40, 20)
    assert measured_lengths(config(task=task | {"max_prompt_tokens": 30}), str(tmp_path)).longest == 30
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": "abc"}]}))
    assert measured_lengths(config(task=task), str(tmp_path)) == RowLengths(6, 6, 2)
    assert measured_lengths(config(task=task), "someone/theirs") == RowLengths(512, 512)
    assert measured_lengths(config(task={"prompts": "mine.py:prompts"}), str(tmp_path)) == RowLengths(512, 512)
    assert measured_lengths(config(task={"prompts": str(tmp_path / "none.jsonl")}), str(tmp_path)).rows == 0


def test_held_out_prompts_count_among_the_longest() -> None:
    def lengths(**evaluate: str) -> RowLengths:
        reverse = "asyncrl.tasks.builtin.reverse"
        return measured_lengths(config(task={"prompts": f"{reverse}:training"}, evaluate=evaluate), "warmed:reverse")

    assert (lengths().mean, lengths().longest) == (6, 6)
    assert lengths(prompts="asyncrl.tasks.builtin.chant:held_out").longest > 6
    assert lengths(prompts="mine.py:held_out") == RowLengths(512, 512)


def test_short_prompts_take_less_than_the_config_allows() -> None:
    chosen = config()
    short = RowLengths(20, 60, 100)
    found = shared_memory(chosen, SMOLLM2, lengths=short)
    allowed = shared_memory(chosen, SMOLLM2)
    assert found.likely_rows < found.rows < allowed.likely_rows == allowed.rows
    for each, most in zip(needs(chosen, SMOLLM2, short), needs(chosen, SMOLLM2), strict=True):
        assert each.expected <= each.bytes <= most.bytes
        assert each.least == most.least, "what is refused does not depend on prompts"
