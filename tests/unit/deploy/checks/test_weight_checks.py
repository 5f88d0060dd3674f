"""Checks of the way of weights and of adapters before a run, and that the run itself refuses the same."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.model_checks import adapter_problems, cache_problems, layers_of
from asyncrl.deploy.preflight import preflight
from asyncrl.engines.generation.block_pool import KV_BLOCK, blocks_for
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.lora import adapted, attach
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.models.model_shape import PACKAGED
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.errors import ConfigError
from tests.unit.engines.generation.conftest import model_folder as model_folder

ModelFolder = Callable[[str], Path]


def config(**sections: Any) -> Config:
    task = {"prompts": "asyncrl.tasks.builtin.reverse:training", "max_prompt_tokens": 40}
    small = {"max_new_tokens": 24, **sections.pop("generation", {})}
    found = {"model": {"name": "warmed:reverse"}, "task": task, "generation": small, **sections}
    return Config.model_validate(found | {"reward": {"functions": ["exact_match"]}})


def problems(chosen: Config, section: str) -> list[Problem]:
    return [each for each in preflight(chosen) if each.key.startswith(section)]


@pytest.mark.parametrize("place", ["/proc/nothere", "{tmp}/file", "{tmp}/file/below"])
def test_a_folder_of_weights_that_cannot_be_used_is_a_problem(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = place.format(tmp=tmp_path)
    (found,) = problems(config(weights={"transport": "file", "folder": folder}), "weights")
    assert (found.key, found.is_warning) == ("weights.folder", False)
    assert folder in found.text


def test_a_folder_that_can_be_made_is_none_and_is_not_made_yet(tmp_path: Path) -> None:
    assert not problems(config(weights={"transport": "file", "folder": str(tmp_path / "new")}), "weights")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("fleet", "warned"),
    [
        ({}, True),
        ({"wire": "inproc"}, True),
        ({"wire": "tcp", "listen": "tcp://127.0.0.1:0", "joined": {"generation": 1}}, False),
    ],
)
def test_a_codec_that_the_chosen_transport_does_not_use_is_announced(fleet: dict[str, Any], warned: bool) -> None:
    found = problems(config(weights={"codec": "sparse"}, fleet=fleet), "weights.codec")
    assert [each.is_warning for each in found] == [True] * warned
    assert all("nothing is encoded" in each.text and 'weights.transport = "tcp"' in each.text for each in found)


@pytest.mark.parametrize("sections", [{}, {"deterministic": True, "slots": 4}])
def test_a_cache_that_the_engine_refuses_is_refused_before(
    sections: dict[str, Any], model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    for size, refused in ((1e-6, True), (1.0, False)):
        chosen = config(generation={"cache_gb": size, **sections})
        found = [*cache_problems(chosen, str(folder))]
        assert [each.key for each in found] == ["generation.cache_gb"] * refused
        if refused:
            with pytest.raises(ConfigError) as raised:
                TorchEngine(folder, chosen)
            assert str(raised.value) == f"generation.cache_gb: {found[0].text}"


def test_a_cache_of_stages_holds_a_row_in_the_layers_of_the_first_one() -> None:
    """30 layers train as 8, 8, 7 and 7, so that the first of two stages samples with 16."""
    shape = PACKAGED["pypi:smollm2"]
    found = []
    sections: dict[str, Any] = {"training": {"layout": {"pp": 4}}, "staleness": {"limit": 0}}
    for layers in (15.5, 16.5):
        generation = {"colocate": "training", "layout": {"pp": 2}}
        row = KV_BLOCK * blocks_for(longest_row(config(generation=generation, **sections)))
        limit = row * shape.cache_bytes_per_token * layers / shape.layers / 10**9
        chosen = config(generation={**generation, "cache_gb": limit}, **sections)
        found.append([each.key for each in cache_problems(chosen, "pypi:smollm2")])
    assert found == [["generation.cache_gb"], []]


def test_a_run_is_refused_for_a_cache_that_is_too_small(model_folder: ModelFolder) -> None:
    model = {"name": str(model_folder("llama"))}
    (found,) = problems(config(model=model, generation={"cache_gb": 1e-6}), "generation.cache_gb")
    assert not found.is_warning


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2"])
@pytest.mark.parametrize("targets", [["all-linear"], ["q_proj", "layers.0.mlp.up_proj"], ["q_proj", "nope"], ["norm"]])
def test_targets_that_match_nothing_are_refused_as_the_engine_does(
    family: str, targets: list[str], model_folder: ModelFolder
) -> None:
    chosen = config(model={"name": "m", "lora": {"rank": 2, "targets": targets}})
    assert chosen.model.lora is not None
    folder = model_folder(family)
    found = [*adapter_problems(chosen, str(folder))]
    model = load_pretrained(folder)
    if not found:
        attach(model, chosen.model.lora, seed=0)
        assert {name for name, _ in adapted(model)} <= layers_of(str(folder)).keys()
        return
    with pytest.raises(ConfigError) as raised:
        attach(model, chosen.model.lora, seed=0)
    assert str(raised.value) == f"model.lora: {found[0].text}"


def test_a_model_made_on_the_spot_has_the_layers_that_are_expected() -> None:
    chosen = config(model={"name": "warmed:reverse", "lora": {"rank": 97}})
    model = build_model(build_tokenizer(()))
    assert chosen.model.lora is not None
    attach(model, chosen.model.lora, seed=0)
    sizes = {name: (each.out_features, each.in_features) for name, each in adapted(model)}
    assert sizes == layers_of("warmed:reverse")


@pytest.mark.parametrize(("rank", "warned"), [(96, False), (97, True)])
def test_a_rank_that_no_layer_can_use_is_warned_about(rank: int, warned: bool) -> None:
    found = problems(config(model={"name": "warmed:reverse", "lora": {"rank": rank}}), "model.lora")
    assert [each.is_warning for each in found] == [True] * warned
    assert all("a rank of at most 96" in each.text for each in found)


def test_models_of_experts_are_left_to_the_run(tmp_path: Path, model_folder: ModelFolder) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_folder("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    described = (folder / "config.json").read_text().replace("{", '{"num_local_experts": 4, ', 1)
    (folder / "config.json").write_text(described)
    assert layers_of(str(folder)) == {}
