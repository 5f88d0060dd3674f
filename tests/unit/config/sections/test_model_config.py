"""The table `model.lora` in every source, and the rules about it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.config.sections.training_config import LoraConfig
from asyncrl.config.sources import load, read
from asyncrl.config.sources.resume import check_resume
from asyncrl.config.toml_writer import dump
from asyncrl.deploy.service_specs import service_specs
from asyncrl.errors import ConfigError
from tests import golden

TEXT = """\
[model]
name = "m"
LORA

[task]
prompts = "p.jsonl"
"""

Loading = Callable[..., Config]


@pytest.fixture
def loading(tmp_path: Path) -> Loading:
    def loaded(written: str = "", *flags: str, **environ: str) -> Config:
        path = tmp_path / "mine.toml"
        path.write_text(TEXT.replace("LORA", written))
        return load(path, flags, environ).config

    return loaded


def config(**sections: Any) -> Config:
    lora = {"name": "m", "lora": sections.pop("lora", {})}
    return Config.model_validate({"model": lora, "task": {"prompts": "p"}, **sections})


def test_a_model_trains_whole_unless_it_has_the_table(loading: Loading) -> None:
    assert loading().model.lora is None
    assert loading("lora = {}").model.lora == LoraConfig(rank=16, alpha=32, targets=("all-linear",), dropout=0)
    assert loading("lora = { rank = 4, targets = ['q_proj'] }").model.lora == LoraConfig(rank=4, targets=("q_proj",))


def test_flags_and_environment_change_single_keys_of_the_table(loading: Loading) -> None:
    assert loading("", "--model.lora.rank", "8").model.lora == LoraConfig(rank=8)
    assert loading("lora = { rank = 4 }", "--model.lora.alpha=7").model.lora == LoraConfig(rank=4, alpha=7)
    assert loading("", "--model.lora", "{ rank = 2 }").model.lora == LoraConfig(rank=2)
    assert loading("lora = { rank = 4 }", "--model.lora", "none").model.lora is None
    assert loading("lora = { rank = 4 }", ASYNCRL_MODEL__LORA="{ rank = 3 }").model.lora == LoraConfig(rank=3)


def test_a_written_config_reads_the_same(tmp_path: Path) -> None:
    for lora in ({}, {"rank": 3, "alpha": 1.5, "targets": ["q_proj", "layers.1.mlp.up_proj"], "dropout": 0.25}):
        (tmp_path / "config.toml").write_text(dump(config(lora=lora)))
        assert read(tmp_path / "config.toml") == config(lora=lora)


@pytest.mark.parametrize(
    "before", [None, {"rank": 8}, {"targets": ["q_proj"]}, {"dropout": 0.1}, {"alpha": 16.0}], ids=str
)
def test_a_resume_with_another_table_is_refused(before: dict[str, Any] | None, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(dump(config(lora=before)))
    assert check_resume(tmp_path, config(lora=before), accept=False) == []
    with golden.raises(ConfigError, match=r"model\.lora"):
        check_resume(tmp_path, config(), accept=False)


def test_the_trainer_has_the_reference_so_that_no_service_holds_a_second_model() -> None:
    kl = {"kl": 0.1}
    assert "reference" in [spec.name for spec in service_specs(config(lora=None, algorithm=kl))]
    assert "reference" not in [spec.name for spec in service_specs(config(algorithm=kl))]
    (warning,) = config(algorithm=kl, reference={"replicas": 2}).warnings
    assert warning.key == "reference.replicas"
    golden.says(warning.text)


@pytest.mark.parametrize("preset", ["ppo", "safe_rlhf"])
def test_a_critic_trains_all_its_weights_and_the_config_says_so(preset: str) -> None:
    costs = {"cost": {"functions": ["exact_match"], "limit": 0.1}} if preset == "safe_rlhf" else {}
    found = config(algorithm={"preset": preset, "kl": 0.1}, **costs)
    assert [each.key for each in found.warnings] == ["model.lora"]
    golden.says(found.warnings[0].text)
    assert {"critic", "reference"} <= {spec.name for spec in service_specs(found)}
    assert not config().warnings
