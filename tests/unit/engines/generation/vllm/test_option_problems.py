"""What asyncrl asks of vLLM, and what it refuses to be asked for."""

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.engines.generation.vllm import option_problems
from asyncrl.engines.generation.vllm.option_problems import (
    DECIDED,
    OWNER,
    argument_names,
    set_environment,
    vllm_problems,
)
from asyncrl.engines.generation.vllm.vllm_generation import cache_bytes, engine_arguments

SHAPE = {"hidden_size": 96, "num_attention_heads": 3, "num_hidden_layers": 2, "max_position_embeddings": 256}
ARGUMENTS = """
class EngineArgs:
    model: str = "x"
    enforce_eager: bool = False
    tensor_parallel_size: int = 1

class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False

class Other:
    unrelated: int = 1
"""


def config(**generation: Any) -> Config:
    sections = {"model": {"name": "warmed:reverse"}, "task": {"prompts": "p.jsonl", "max_prompt_tokens": 60}}
    return Config.model_validate({**sections, "generation": {"engine": "vllm", "max_new_tokens": 40} | generation})


def problems(chosen: Config) -> dict[str, Problem]:
    return {problem.key: problem for problem in vllm_problems(chosen)}


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A vLLM of which only the names of arguments are there."""
    (tmp_path / "vllm/engine").mkdir(parents=True)
    (tmp_path / "vllm/__init__.py").write_text("raise AssertionError('it must not be imported')")
    (tmp_path / "vllm/engine/arg_utils.py").write_text(ARGUMENTS)
    origin = type("Spec", (), {"origin": str(tmp_path / "vllm/__init__.py")})
    monkeypatch.setattr(option_problems, "find_spec", lambda _: origin)
    argument_names.cache_clear()
    yield
    argument_names.cache_clear()


def test_arguments_are_checked_by_name_without_importing_vllm(installed: None) -> None:
    assert argument_names() == {"model", "enforce_eager", "tensor_parallel_size", "enable_log_requests"}
    options = {"tensor_paralel_size": 2, "enforce_eager": True, "model": "m", "logprobs_mode": "raw_logits"}
    found = problems(config(vllm=options))
    assert found.keys() == {f"generation.vllm.{name}" for name in ("tensor_paralel_size", "model", "logprobs_mode")}
    assert "did you mean 'tensor_parallel_size'?" in found["generation.vllm.tensor_paralel_size"].text
    assert "write model.name" in found["generation.vllm.model"].text
    assert not any(problem.is_warning for problem in found.values())


def test_what_vllm_cannot_do_is_refused(tmp_path: Path) -> None:
    chosen = config(deterministic=True, cache_gb=1.0, prefill_tokens=64).model_copy(
        update={"model": config().model.model_copy(update={"name": "m"})}
    )
    chosen = Config.model_validate(
        chosen.model_dump() | {"model": {"name": str(tmp_path), "float32_head": True, "dtype": "bfloat16"}}
    )
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | {"num_attention_heads": 4}))
    found = problems(chosen)
    refused = {f"generation.{name}" for name in ("deterministic", "cache_gb", "prefill_tokens")}
    assert found.keys() == refused | {"model.float32_head", "model.name"}
    assert "have 24 numbers" in found["model.name"].text
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    assert "model.name" not in problems(chosen)


def test_the_section_is_unread_without_vllm() -> None:
    (found,) = vllm_problems(config(engine="torch", vllm={"enforce_eager": True}))
    assert found.is_warning
    assert not list(vllm_problems(config(engine="torch")))


def test_processes_that_share_a_replica_divide_its_heads(tmp_path: Path) -> None:
    (refused,) = vllm_problems(config(engine="torch", layout_tp=2))
    assert (refused.key, refused.is_warning) == ("generation.layout_tp", False)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    chosen = config(layout_tp=2).model_dump() | {"model": {"name": str(tmp_path)}}
    assert "share 3 attention heads" in problems(Config.model_validate(chosen))["generation.layout_tp"].text
    chosen["generation"]["layout_tp"] = 3
    assert "generation.layout_tp" not in problems(Config.model_validate(chosen))
    found = engine_arguments(config(layout_tp=3, slots=9, max_new_tokens=40), tmp_path, SHAPE)
    assert found["tensor_parallel_size"] == 3
    assert found["kv_cache_memory_bytes"] == cache_bytes(SHAPE, "float32", 101, 9) // 3
    found = problems(config(vllm={"tensor_parallel_size": 2}))
    assert "write generation.layout_tp" in found["generation.vllm.tensor_parallel_size"].text


def test_decided_arguments_win_and_defaults_do_not(tmp_path: Path) -> None:
    given = {"enforce_eager": False, "max_num_seqs": 3, "kv_cache_memory_bytes": 7}
    found = engine_arguments(config(slots=9, vllm=given), tmp_path, SHAPE)
    assert (found["enforce_eager"], found["kv_cache_memory_bytes"]) == (False, 7)
    assert (found["max_num_seqs"], found["max_model_len"], found["logprobs_mode"]) == (9, 101, "processed_logprobs")
    assert found.keys() >= DECIDED.keys() - {"tokenizer", "weight_transfer_config"}
    on_a_gpu = engine_arguments(config(device="cuda"), tmp_path, SHAPE)
    assert on_a_gpu["weight_transfer_config"] == {"backend": "asyncrl"}
    assert "kv_cache_memory_bytes" not in on_a_gpu
    assert engine_arguments(config(max_new_tokens=400), tmp_path, SHAPE)["max_model_len"] == 256


def test_the_cache_holds_every_slot_with_the_longest_row() -> None:
    """101 tokens are one block of 128; keys and values of 2 layers and 3 heads of 32 float32 numbers."""
    assert cache_bytes(SHAPE, "float32", 101, 9) == (9 + 2 + 1) * 128 * 2 * 2 * 3 * 32 * 4
    assert cache_bytes(SHAPE, "bfloat16", 129, 9) == ((9 + 2) * 2 + 1) * 128 * 2 * 2 * 3 * 32 * 2


def test_the_environment_of_a_user_is_kept_and_the_device_named() -> None:
    environment = {"VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": "4,5"}
    set_environment(environment, config(device="cuda:1"))
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environment["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert environment[OWNER].isdigit()


def test_a_worker_with_gpus_of_its_own_sees_only_those() -> None:
    inherited = {"CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    set_environment(inherited, config(device="cuda:1"), ("cuda:1", "cuda:3"))
    assert inherited["CUDA_VISIBLE_DEVICES"] == "5,7"
    bare: dict[str, str] = {}
    set_environment(bare, config(device="cuda:1"), ("cuda:2",))
    assert bare["CUDA_VISIBLE_DEVICES"] == "2"
