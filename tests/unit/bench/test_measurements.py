import math
import mmap
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncrl.bench import generation_speed
from asyncrl.bench.benchmark_model import write_model
from asyncrl.bench.end_to_end import SAMPLES, asyncrl_result, lognormal, trl_result, workloads
from asyncrl.bench.generation_speed import GROUPS, MEMBERS, PAGE, prompts_of, resident_bytes
from asyncrl.bench.measurements import (
    T_95,
    RoundValues,
    differences,
    goal_line,
    in_turn,
    number,
    own_seconds,
    ratios,
    recovered_share,
    round_values,
    table,
    upper_bound,
)
from asyncrl.bench.overhead.runtime_cost import bound
from asyncrl.bench.packed_rows import StepShape, rows_of, tokens_per_second, trainer
from asyncrl.bench.rivals.even_words_reward import share_of_even
from asyncrl.config.schema import Config
from asyncrl.engines.training import micro_batches, packed_rows
from asyncrl.engines.training.train_rows import Ids

WORK = "import time; sum(range(20_000_000)); print(time.process_time(), flush=True); input()"
"""Says how many CPU seconds it took, and lives on."""


def test_sides_take_turns_in_an_order_that_turns_around() -> None:
    order: list[str] = []

    def side(name: str, value: float) -> float:
        order.append(name)
        return value

    found = in_turn({"a": lambda: side("a", len(order)), "b": lambda: side("b", 10)}, rounds=3)
    assert "".join(order) == "abbaab"
    assert found == {"a": [0, 3, 4], "b": [10, 10, 10]}
    assert round_values(found)["a"].median == 3


def test_ratios_are_of_the_same_round() -> None:
    assert ratios(RoundValues((2.0, 9.0)), RoundValues((1.0, 3.0))).values == (2.0, 3.0)


@pytest.mark.parametrize(
    ("value", "goal", "at_most", "met"),
    [(2.0, 2.0, False, True), (1.99, 2.0, False, False), (0.01, 0.01, True, True), (0.02, 0.01, True, False)],
)
def test_goals(value: float, goal: float, at_most: bool, met: bool) -> None:
    assert ("MISSED" in goal_line("it", value, goal, at_most=at_most)) is not met


def test_numbers_keep_what_matters() -> None:
    assert [number(value) for value in (12345.6, 99.94, 0.00123)] == ["12,346", "99.9", "0.00123"]


def test_columns_line_up() -> None:
    lines = table(("", "value"), [("long name", "1"), ("b", "22")]).splitlines()
    assert {line.index(cell) for line, cell in zip(lines, ("value", "1", "22"), strict=True)} == {13}


def test_what_a_child_uses_that_lives_is_no_use_of_others() -> None:
    before = own_seconds()
    grandchild = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {WORK!r}])"
    with subprocess.Popen([sys.executable, "-c", grandchild], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None, "a pipe"
        used = float(child.stdout.readline())
        assert own_seconds() - before >= used - 0.03  # The kernel counts in hundredths.
        child.communicate(b"\n")
    assert own_seconds() - before >= used - 0.03


def test_the_bound_is_students_t_of_the_mean() -> None:
    # mean 0.02, sample variance 0.00025, of five values: 0.02 + 2.132 * sqrt(0.00025 / 5)
    assert upper_bound([0.0, 0.01, 0.02, 0.03, 0.04]) == pytest.approx(0.02 + 2.132 * math.sqrt(0.00005))


def test_one_pair_bounds_nothing_and_more_than_ten_are_bounded_cautiously() -> None:
    assert upper_bound([0.0]) == math.inf
    assert upper_bound([0.0, 1.0] * 10) > 0.5 + 1.729 * 0.513 / math.sqrt(20)  # t of 19 degrees of freedom
    assert list(T_95.values()) == sorted(T_95.values(), reverse=True)


def test_sides_are_compared_over_the_seeds_that_both_have() -> None:
    assert differences({0: 1.0, 1: 0.9, 2: 0.1}, {2: 0.3, 0: 0.75, 7: 5.0}) == [0.25, pytest.approx(-0.2)]
    assert differences({0: 1.0}, {1: 1.0}) == []


@pytest.mark.parametrize(
    ("corrected", "share"), [({0: 0.5, 1: 0.5}, 0.0), ({0: 0.9, 1: 0.7}, 1.0), ({0: 0.6, 1: 0.7}, 0.5)]
)
def test_recovered_share_counts_from_the_uncorrected_run(corrected: dict[int, float], share: float) -> None:
    assert recovered_share({0: 0.9, 1: 0.7}, {0: 0.5, 1: 0.5}, corrected) == pytest.approx(share)


def test_a_share_is_taken_over_the_seeds_of_all_three() -> None:
    assert recovered_share({0: 1.0, 1: 1.0}, {0: 0.5, 1: 0.0, 2: 0.0}, {0: 0.75, 2: 9.0}) == 0.5


def test_where_nothing_was_lost_nothing_is_recovered() -> None:
    assert math.isnan(recovered_share({0: 0.5}, {0: 0.5}, {0: 0.9}))
    assert math.isnan(recovered_share({0: 0.5}, {0: 0.6}, {0: 0.9}))


# The steps of asyncrl-bench packed-rows: both sides train the same tokens, and only one packs them.
def test_sides_differ_in_packing_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[int] = []
    pack = packed_rows.pack_rows

    def counted(prompts: Sequence[Ids], responses: Sequence[Ids], *limits: float) -> object:
        packed.append(len(prompts))
        return pack(prompts, responses, *limits)

    monkeypatch.setattr(micro_batches, "pack_rows", counted)
    model = write_model(tmp_path)
    rows = rows_of(StepShape(6, 3, 2, 2))
    assert [len(row.prompt_ids) for row in rows] == [6] * 4
    assert rows[0].prompt_ids.tolist() == rows[1].prompt_ids.tolist() != rows[2].prompt_ids.tolist()
    assert tokens_per_second(trainer(model, packs=False), rows) > 0
    assert packed == []
    assert tokens_per_second(trainer(model, packs=True), rows) > 0
    assert packed


def test_lengths_are_lognormal_and_always_the_same() -> None:
    order = list(range(SAMPLES))
    random.Random(1).shuffle(order)
    lengths = lognormal(SAMPLES, 32, 1.0, 256, order)
    assert sorted(lengths) == sorted(lognormal(SAMPLES, 32, 1.0, 256, range(SAMPLES)))
    assert sorted(lengths)[SAMPLES // 2] == pytest.approx(32 * 0.6065, abs=1)  # median = mean / exp(sigma^2 / 2)
    assert (min(lengths) >= 1, max(lengths)) == (True, 256)
    assert 29 < sum(lengths) / SAMPLES < 32  # the cap takes a little


def test_every_workload_gives_each_sample_of_a_batch_a_length() -> None:
    assert {len(each.lengths) for each in workloads(32).values()} == {SAMPLES}


def test_the_reward_counts_even_words() -> None:
    assert share_of_even("w10 w3 w4 w9") == 0.5
    assert share_of_even("") == 0.0


def test_steps_of_the_warm_up_count_for_nothing() -> None:
    shares = {f"time/{stage}/busy": 0.5 for stage in ("generation", "reward", "training")}
    lines = [{"time": t, "tokens/trained": n, "reward/mean": t, **shares} for t, n in ((10, 999), (12, 10), (16, 20))]
    outcome = asyncrl_result(lines, warm=1)
    assert (outcome.rate, outcome.seconds, outcome.reward) == (5.0, 3.0, 16)
    assert outcome.stages == {"generation": 1.5, "reward": 1.5, "training": 1.5}


def test_what_trl_does_neither_in_generation_nor_in_reward_is_training() -> None:
    lines = [
        {"ended": ended, "tokens": tokens, "reward": 0.5, "generation": generation, "reward_seconds": 0.5}
        for ended, tokens, generation in ((5.0, 999, 99.0), (10.0, 20, 4.0), (15.0, 0, 0.0))
    ]
    outcome = trl_result(lines, warm=1)
    assert (outcome.rate, outcome.seconds) == (2.0, 5.0)
    assert outcome.stages == {"generation": 2.0, "reward": 0.5, "training": 2.5}


def test_a_step_takes_its_longest_stage_or_its_share_of_a_cycle() -> None:
    assert bound((0.2, 0.04, 0.04, 0.2)) == 0.2
    assert bound((0.1, 0.8, 0.0, 0.1)) == 0.8
    assert bound((0.0, 0.0, 0.0, 0.0)) == 0.0


# The parts of `asyncrl-bench generation` that can be wrong without a number that looks wrong.
def test_memory_is_that_of_the_pages_that_were_written() -> None:
    pages = mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages.madvise(mmap.MADV_NOHUGEPAGE)
    tensor = torch.from_numpy(np.frombuffer(pages, np.uint8))
    for page in (0, 7, 63):
        tensor[page * PAGE] = 1
    assert resident_bytes([tensor]) == 3 * PAGE


def test_members_have_one_prompt_only_on_the_side_that_shares_it() -> None:
    shared, apart = (prompts_of(shared=shared) for shared in (True, False))
    assert len({request.prompt.tobytes() for request in shared}) == GROUPS
    assert len({request.prompt.tobytes() for request in apart}) == GROUPS * MEMBERS


@pytest.mark.parametrize(("flags", "arguments"), [([], {}), (["--compiled"], {"enforce_eager": False})])
def test_vllm_compiles_the_model_only_where_it_is_asked_to(
    flags: list[str], arguments: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Config] = []

    class Started(Exception):
        pass

    def start(folder: Path, config: Config) -> None:
        seen.append(config)
        raise Started

    monkeypatch.setattr(generation_speed, "find_spec", lambda name: "here")
    monkeypatch.setattr(generation_speed, "VllmSide", start)
    with pytest.raises(Started):
        generation_speed.main(["--engine", "vllm", *flags])
    assert [each.generation.vllm for each in seen] == [arguments]
