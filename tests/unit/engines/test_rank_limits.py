"""A layout whose ranks cannot share out the model is refused before anything starts, from config.json alone."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.engines.models.model_shape import described
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.engines.ranks.rank_limits import SPLIT, models_of_services, rank_problems

LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
}
EXPERTS = {**LLAMA, "model_type": "mixtral", "num_local_experts": 6}
CRITIC = {"algorithm": {"preset": "ppo", "kl": 0.1}}
ALL = "num_attention_heads = 8, num_key_value_heads = 2 and intermediate_size = 24"


def problems(folder: Path, shape: dict[str, Any], **sections: Any) -> list[str]:
    (folder / "config.json").write_text(json.dumps(shape))
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}} | sections)
    return [
        str(each).replace(f"{folder}: ", "") for each in rank_problems(config, models_of_services(config, str(folder)))
    ]


@pytest.mark.parametrize(
    ("layout", "shape", "says"),
    [
        ({"tp": 5}, LLAMA, f"tp = 5 does not divide {ALL}: write 1 or 2"),
        ({"tp": 4}, LLAMA, "tp = 4 does not divide num_key_value_heads = 2: write 1 or 2"),
        ({"tp": 8}, {**LLAMA, "num_key_value_heads": None}, ""),
        ({"tp": 2}, LLAMA, ""),
        ({"pp": 4}, LLAMA, "pp = 4 is more than its layers, num_hidden_layers = 3: write 3 or less"),
        ({"pp": 3}, LLAMA, ""),
        ({"pp": 2}, {**LLAMA, "model_type": "mistral"}, "pp splits models of the families llama, qwen2, qwen3"),
        ({"sp": 4}, LLAMA, "sp = 4 does not divide num_key_value_heads = 2: write 1 or 2"),
        ({"sp": 2}, {**LLAMA, "model_type": "gemma"}, "sp cuts rows of the families llama, mistral, qwen2, qwen3"),
        ({"ep": 2}, LLAMA, "ep = 2 is not supported for the family 'llama'"),
        ({"ep": 4}, EXPERTS, "ep = 4 is not supported for a model with 6 experts: write one of 1, 2, 3, 6"),
        ({"ep": 3}, EXPERTS, ""),
        ({"dp": 5}, LLAMA, ""),
        ({"shard": 5}, LLAMA, ""),
        ({"tp": 5}, {"model_type": "gpt2"}, ""),
    ],
)
def test_layouts_of_the_trainer(layout: dict[str, int], shape: dict[str, Any], says: str, tmp_path: Path) -> None:
    found = problems(tmp_path, shape, training={"layout": layout})
    assert len(found) == bool(says)
    assert all(text.startswith(f"training.layout: {says}") for text in found), found


@pytest.mark.parametrize(("family", "refused"), [("llama", False), ("gemma", True), ("qwen2_5_vl", True)])
def test_families_that_ranks_cannot_sample_with_together(family: str, refused: bool, tmp_path: Path) -> None:
    sections = {
        "generation": {"colocate": "training", "layout": {"tp": 2}},
        "training": {"layout": {"tp": 2}},
        "staleness": {"limit": 0},
    }
    found = problems(tmp_path, {**LLAMA, "model_type": family}, **sections)
    says = "generation.layout: tp = 2 cuts models of the families llama, mistral, qwen2, qwen3, and this one is"
    assert found == [f"{says} {family}; write tp = 1"] * refused


def test_each_service_is_held_to_its_own_model(tmp_path: Path) -> None:
    scorer = tmp_path / "scorer"
    scorer.mkdir()
    (scorer / "config.json").write_text(json.dumps({**LLAMA, "num_attention_heads": 9, "num_key_value_heads": 3}))
    layout = {"layout": {"tp": 3}}
    services: dict[str, Any] = {"critic": layout, "reference": layout, "reward": {**layout, "model": str(scorer)}}
    found = problems(tmp_path, LLAMA, **CRITIC, **services)
    assert [text.partition(":")[0] for text in found] == ["critic.layout", "reference.layout"]
    services["critic"] = {**layout, "model": str(scorer)}
    services["reward"] = {"layout": {"tp": 2}, "model": str(scorer)}
    found = problems(tmp_path, LLAMA, **CRITIC, **services)
    assert [text.partition(":")[0] for text in found] == ["reference.layout", "reward.layout"]
    assert f"{scorer}: tp = 2 does not divide num_attention_heads = 9 and num_key_value_heads = 3" in found[1]


@pytest.mark.parametrize(("engine", "heads"), [("torch", 4), ("vllm", 3)])
def test_models_that_are_made_on_the_spot_are_known_before(engine: str, heads: int) -> None:
    known = described("warmed:reverse", engine)
    made = build_model(build_tokenizer(()), heads=heads).config.to_dict()
    assert known is not None
    for name in ("model_type", "num_hidden_layers", "hidden_size", *SPLIT):
        assert known[name] == made[name], name
    sections: dict[str, Any] = {"training": {"layout": {"tp": 2}}, "generation": {"engine": engine}}
    config = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, **sections})
    assert len(list(rank_problems(config, {"training": "warmed:reverse"}))) == heads % 2
