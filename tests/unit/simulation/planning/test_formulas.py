"""Formulas of the cost model against what can be counted by hand, and against each other."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from asyncrl.engines.models.model_shape import Shape
from asyncrl.errors import ConfigError
from asyncrl.simulation.planning import formulas
from asyncrl.simulation.planning.formulas import Degrees
from asyncrl.simulation.planning.gpus import Rates, gpu_named, known_gpus, read_gpus
from asyncrl.simulation.planning.model_size import NAMED, model_size
from asyncrl.simulation.planning.predictions import CostModel, calibrated

A100 = gpu_named("A100").likely
LLAMA = model_size("llama-7b")
EXPERTS = model_size("qwen3-30b-a3b")
IDEAL = Rates(1e15, 1e15, 1.0, 1e12, 1e12, 1e12, 0.0, 0.0, 8)


def test_a_lone_sequence_decodes_as_fast_as_weights_and_cache_are_read() -> None:
    read = 2 * LLAMA.parameters + 100 * LLAMA.cache_bytes
    assert formulas.decode_step_seconds(LLAMA, IDEAL, 1, 100, Degrees()) == pytest.approx(read / 1e12)
    assert formulas.decode_step_seconds(LLAMA, IDEAL, 1, 100, Degrees(tp=2)) == pytest.approx(read / 2e12, rel=1e-3)


def test_many_sequences_decode_as_fast_as_a_gpu_computes() -> None:
    slow = replace(IDEAL, compute=1e12)
    work = 4096 * (2 * LLAMA.active_parameters + 4 * 32 * 4096)
    assert formulas.decode_step_seconds(LLAMA, slow, 4096, 1, Degrees()) == pytest.approx(work / 1e12)


def test_a_few_sequences_read_few_experts() -> None:
    one, many = (formulas.decode_step_seconds(EXPERTS, IDEAL, count, 1, Degrees()) for count in (1, 1000))
    assert one == pytest.approx(2 * (EXPERTS.plain_parameters + 48 * 8 * EXPERTS.expert_parameters) / 1e12, rel=1e-3)
    assert many / one > 8


def test_expert_parallelism_reads_fewer_experts_and_pays_for_exchanges() -> None:
    alone, spread = (formulas.decode_step_seconds(EXPERTS, A100, 256, 1000, Degrees(dp=dp, ep=dp)) for dp in (1, 8))
    assert spread < alone
    slow = replace(A100, link=1e9, network=1e9)
    assert formulas.decode_step_seconds(EXPERTS, slow, 256, 1000, Degrees(dp=8, ep=8)) > alone


def test_training_takes_six_operations_a_parameter_and_token() -> None:
    work = 64 * 100 * (6 * LLAMA.active_parameters + 12 * 32 * 4096 * 50)
    found = formulas.training_seconds(LLAMA, replace(IDEAL, memory=1e30), 64, 100, Degrees(), updates=1)
    assert found == pytest.approx(work / 1e15)


def test_a_pipeline_has_a_bubble_and_few_samples_a_larger_one() -> None:
    assert formulas.bubble(8, Degrees(pp=4), 1) == pytest.approx(11 / 8)
    assert formulas.bubble(64, Degrees(pp=4), 1) == pytest.approx(67 / 64)
    assert formulas.bubble(4, Degrees(dp=8), 1) == pytest.approx(2)


def test_gradients_of_more_ranks_move_more_bytes_over_slower_links() -> None:
    inside, across = (formulas.gradient_seconds(LLAMA, A100, Degrees(tp=tp, dp=2)) for tp in (4, 8))
    assert inside == pytest.approx(1 / 2 * 6 * LLAMA.parameters / 4 / A100.link)
    assert across == pytest.approx(1 / 2 * 6 * LLAMA.parameters / 8 / A100.network)


def test_members_of_a_ring_on_one_host_share_what_comes_in() -> None:
    rates = replace(A100, network=3e9, link=165e9)
    assert rates.bandwidth(16, stride=1) == 8 * 3e9
    assert rates.bandwidth(16, stride=8) == rates.bandwidth(16) == 3e9
    assert rates.bandwidth(8, stride=1) == 165e9


def test_zero_redundancy_groups_receive_what_table_2_of_hybridflow_says() -> None:
    for tp, pp, dp, a, b in product((1, 2, 4, 8), (1, 2, 4), (1, 2), (1, 2), (1, 2)):
        if tp % a or pp % b:
            continue
        train = Degrees(tp, pp, dp)
        generate = Degrees(tp // a, pp // b)
        micro = a * b
        assert formulas.transition_share(train, generate, "hybridflow") == pytest.approx((micro - 1) / (tp * pp))
        assert formulas.transition_share(train, generate, "regrouped") == pytest.approx((tp * pp - 1) / (tp * pp))


def test_the_transition_of_70b_is_cut_by_89_percent_beside_a_copy_from_other_gpus() -> None:
    """HybridFlow section 8.4: "up to 89.1 %", for 70B with t = 8, p = 8 and t_g = 8."""
    share = formulas.transition_share(Degrees(8, 8, 2), Degrees(8), "hybridflow")
    assert 1 - share / formulas.transition_share(Degrees(8, 8, 2), Degrees(8), "copied") == pytest.approx(
        0.891, abs=5e-4
    )


@pytest.mark.parametrize("gpu", known_gpus())
def test_every_prediction_is_an_interval_that_is_neither_a_point_nor_endless(gpu: str) -> None:
    costs = CostModel(EXPERTS, gpu_named(gpu))
    degrees = Degrees(tp=2, dp=4, ep=4)
    found = [
        costs.prefill(8192, 1024, degrees),
        costs.decode_step(64, 1024, degrees),
        costs.generation(64, 512, 512, degrees),
        costs.scoring(64, 1024, degrees),
        costs.training(64, 1024, degrees),
        costs.transition(Degrees(8, 1, 2), Degrees(2)),
        costs.transfer(8, degrees),
    ]
    for each in found:
        assert 0 < each.low < each.likely < each.high < 10 * each.likely


def test_more_bytes_taken_leave_room_for_fewer_sequences() -> None:
    costs = CostModel(LLAMA, gpu_named("A100"))
    assert costs.room(2048, Degrees()) == int((72e9 - 2 * LLAMA.parameters) / (2048 * LLAMA.cache_bytes))
    assert costs.room(2048, Degrees(), taken=60e9) == 0


def test_training_memory_falls_with_each_degree_and_sharded_optimizers() -> None:
    whole = formulas.training_bytes(LLAMA, Degrees(), 1)
    assert whole == pytest.approx(18 * LLAMA.parameters, rel=0.01)
    assert formulas.training_bytes(LLAMA, Degrees(dp=8), 1) == pytest.approx(7.5 * LLAMA.parameters, rel=0.01)
    assert formulas.training_bytes(LLAMA, Degrees(tp=8), 1) == pytest.approx(18 / 8 * LLAMA.parameters, rel=0.01)


def test_a_measurement_moves_and_narrows_a_prediction() -> None:
    predicted = CostModel(LLAMA, gpu_named("A100")).training(64, 1024, Degrees(8))
    narrow = calibrated(predicted, predicted.likely, 10.0)
    assert narrow.likely == pytest.approx(10.0)
    assert narrow.high / narrow.low < predicted.high / predicted.low


# Tables of GPUs: those that come with asyncrl, and those of a user.
TABLE = gpu_named("A100").model_dump()


def test_the_named_gpus_are_there_and_better_levels_are_faster() -> None:
    assert set(known_gpus()) == {"A100", "H100", "H200", "GB200", "H20"}
    for gpu in known_gpus().values():
        low, likely, high = gpu.levels
        assert low.compute < likely.compute < high.compute <= gpu.peak
        assert low.memory < likely.memory < high.memory <= gpu.bandwidth
        assert low.step > likely.step > high.step


@pytest.mark.parametrize("suffix", ["json", "toml"])
def test_a_table_of_the_user_wins(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"mine.{suffix}"
    table = {"A100": {**TABLE, "network": 3.125e9}, "mine": TABLE}
    lines = (
        f"[{name}]\n" + "\n".join(f"{key} = {json.dumps(value)}" for key, value in each.items())
        for name, each in table.items()
    )
    path.write_text(json.dumps(table) if suffix == "json" else "\n".join(lines))
    found = read_gpus(path)
    assert gpu_named("A100", found).network == 3.125e9
    assert gpu_named("mine", found) == gpu_named("A100")
    assert gpu_named("H100", found) == gpu_named("H100")


def test_a_bad_table_is_refused_with_the_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"mine": {**TABLE, "peak": -1}}))
    with pytest.raises(ConfigError, match=r"mine\.json: mine\.peak|mine\.json: peak"):
        read_gpus(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_gpus(tmp_path / "nothing.toml")
    with pytest.raises(ConfigError, match="there is no GPU 'B9'; known are A100"):
        gpu_named("B9")


# Sizes of models by name against the parameters that their makers publish.
PUBLISHED = {
    "llama-7b": (6.74, 6.6),
    "llama-13b": (13.02, 12.9),
    "llama-70b": (68.98, 68.7),
    "llama-3.1-8b": (8.03, 7.5),
    "qwen2.5-7b": (7.62, 7.07),
    "qwen3-30b-a3b": (30.5, 3.0),
    "qwen3-235b-a22b": (235.0, 21.6),
    "deepseek-v3": (671.0, 36.6),
}
"""Billions of parameters, all and for each token without the looked up embedding."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_the_published_ones(name: str) -> None:
    size = model_size(name)
    assert (size.parameters / 1e9, size.active_parameters / 1e9) == pytest.approx(PUBLISHED[name], rel=0.02)


def test_a_dense_model_has_the_parameters_that_plans_of_memory_count() -> None:
    for name in ("llama-7b", "qwen3-4b"):
        assert model_size(name).parameters == Shape.of(NAMED[name]).parameters


def test_latent_attention_caches_one_compressed_vector() -> None:
    assert model_size("deepseek-v3").cache_bytes == 61 * (512 + 64) * 2
    assert model_size("llama-7b").cache_bytes == 32 * 2 * 4096 * 2


def test_many_tokens_touch_all_experts_and_one_token_touches_those_it_chose() -> None:
    size = model_size("qwen3-30b-a3b")
    assert size.touched_experts(1) == pytest.approx(8)
    assert size.touched_experts(1000) == pytest.approx(128)
    assert model_size("llama-7b").touched_experts(5) == 0


def test_a_model_is_read_from_its_folder_and_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(NAMED["qwen2.5-7b"]))
    assert model_size(str(tmp_path)).parameters == model_size("qwen2.5-7b").parameters
    with pytest.raises(ConfigError, match="that is understood; known: llama-7b"):
        model_size(str(tmp_path / "nothing"))
