"""The file with which eight hosts of eight GPUs train a model of 8B parameters passes all checks on a machine without
GPUs, for each transport of weights that crosses a network."""

import json
import re
from pathlib import Path

import pytest

from asyncrl.config.placement import Placement
from asyncrl.config.sources import load
from asyncrl.deploy import cli
from asyncrl.deploy.checks.memory_needs import CHECKPOINTS, OFFERED, TAKEN, memory_problems, planned_workers
from asyncrl.deploy.preflight import preflight
from asyncrl.engines.models.model_shape import shape_of
from asyncrl.errors import ConfigError

SHAPE = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "hidden_act": "silu", "eos_token_id": 151645,
}  # fmt: skip
EIGHT = json.dumps([f"cuda:{number}" for number in range(8)])
RECIPE = """
name = "qwen3-8b-grpo"
steps = 100
[model]
name = "MODEL"
dtype = "bfloat16"
[task]
prompts = "asyncrl.tasks.builtin.reverse:training"
prompts_per_step = 64
samples_per_prompt = 8
[[reward.functions]]
use = "exact_match"
[generation]
replicas = 48
pool = "gen"
max_new_tokens = 4096
slots = 128
[training]
pool = "train"
layout = { shard = 8, dp = 2 }
[weights]
transport = "auto"
[fleet]
wire = "tcp"
listen = "tcp://127.0.0.1:7000"
joined = { generation = 48, training = 16 }
[pools.train]
devices = EIGHT
hosts = ["n1", "n2"]
[pools.gen]
devices = EIGHT
hosts = ["n3", "n4", "n5", "n6", "n7", "n8"]
""".replace("EIGHT", EIGHT)


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    """The recipe, for a model of which the description is here."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(SHAPE))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE.replace("MODEL", str(tmp_path / "model")))
    return path


@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_the_recipe_passes_plan_and_the_checks_of_a_run(
    transport: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--weights.transport", transport]
    assert cli.main(["plan", str(recipe), *flags]) == 0
    said = capsys.readouterr().out
    assert re.search(r"^training0\.7 +n1 +cuda:7 ", said, re.MULTILINE)
    assert re.search(r"^training0\.8 +n2 +cuda:0 ", said, re.MULTILINE)
    assert "training.layout.dp = 2: 8 of 8 groups of ranks cross hosts" in said
    assert "training.layout.shard" not in said, "each group that shares out weights is on one host"
    found = preflight(load(str(recipe), flags).config, model_is_made=True)
    assert [str(each) for each in found if not each.is_warning] == []


@pytest.mark.parametrize(
    ("transport", "device", "offered", "taken"),
    [
        ("tcp", "cpu", {"n1": 3}, dict.fromkeys(("n3", "n4", "n5", "n6", "n7", "n8"), 16)),
        ("nccl", "cuda:0", {"n1": 3}, {}),
    ],
)
def test_versions_of_the_weights_are_on_the_hosts_that_hold_them(
    transport: str, device: str, offered: dict[str, int], taken: dict[str, int], recipe: Path
) -> None:
    config = load(str(recipe), ["--weights.transport", transport]).config
    shape = shape_of(config.model.name)
    assert shape is not None
    version = 2 * shape.parameters
    workers = list(planned_workers(config, shape))
    sent = [each for each in workers if each.need.name == OFFERED]
    assert {each.host: each.bytes / version for each in sent} == offered
    assert {each.device for each in sent} == {device}
    received = [each for each in workers if each.need.name == TAKEN]
    if transport == "nccl":
        assert {(each.host, each.device) for each in received} == {
            (each.host, each.devices[0]) for each in Placement.of(config).readers
        }
        assert {each.bytes / version for each in received} == {2}
    else:
        assert {each.host: each.bytes / version for each in received} == taken
    assert {each.host for each in workers if each.need.name == CHECKPOINTS} == {"n1"}, "ranks of one copy write"
    assert {each.host for each in workers if each.is_here} == {
        each.host for each in workers if each.name == "reward0.0"
    }
    assert not list(memory_problems(config, shape, 2**30))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"hosts = [\"n3\"": "hosts = [\"n2\", \"n3\""}, None),
        ({"pool = \"train\"\nlayout = { shard = 8, dp = 2 }": "pool = \"gen\"\nlayout = { shard = 8, dp = 2 }"},
         "training is on cuda:0 of n3, generation32.0 on cuda:0 of n3, and NCCL wants one GPU for each"),
        ({"hosts = [\"n1\", \"n2\"]": "hosts = [\"n3\", \"n4\"]"},
         "training is on cuda:0 of n3, generation on cuda:0 of n3, and NCCL wants one GPU for each"),
    ],
)  # fmt: skip
def test_nccl_is_refused_where_a_reader_has_the_gpu_of_the_trainer(
    changed: dict[str, str], says: str | None, recipe: Path
) -> None:
    text = recipe.read_text().replace('transport = "auto"', 'transport = "nccl"')
    for old, new in changed.items():
        assert old in text
        text = text.replace(old, new)
    recipe.write_text(text)
    if says is None:
        assert load(str(recipe), []).config.weights.transport == "nccl"
        return
    with pytest.raises(ConfigError, match=re.escape(says)):
        load(str(recipe), [])
