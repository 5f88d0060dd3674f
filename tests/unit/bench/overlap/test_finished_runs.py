"""The analysis of a finished run finds the truth of schedules for which it is known."""

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from asyncrl.bench import cli
from asyncrl.bench.overlap import comparison, finished_runs
from asyncrl.bench.overlap.accounting import Overlap, busy_intervals, cycle_seconds, overlap_fraction, overlap_of
from asyncrl.bench.overlap.finished_runs import bottleneck
from asyncrl.deploy.report.run_record import read_run
from asyncrl.deploy.report.worker_trace import Arrow, Slice, WorkerTrace
from asyncrl.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parents[2] / "deploy" / "report"))
from recorded_runs import recorded_run, step

NO_TRACE = WorkerTrace([], [], 0)


def spent(service: str, **shares: float) -> dict[str, float]:
    """The metrics of one service; the rest of its time is starved."""
    states = dict.fromkeys(("busy", "blocked", "sync", "overhead", "unaccounted"), 0.0) | shares
    states["starved"] = 1.0 - sum(states.values())
    return {f"time/{service}/{state}": share for state, share in states.items()}


def steps(lengths: Sequence[float], **services: dict[str, float]) -> list[dict[str, Any]]:
    """Steps of these lengths in seconds; each service has the same shares in all of them."""
    shares = {key: share for name, each in services.items() for key, share in spent(name, **each).items()}
    times = [sum(lengths[: number + 1]) for number in range(len(lengths))]
    return [step(n + 1, time, **{"tokens/trained": 100.0}, **shares) for n, time in enumerate(times)]


def overlap_in(path: Path, lines: list[dict[str, Any]], trace: WorkerTrace = NO_TRACE, **sections: Any) -> Overlap:
    return overlap_of(read_run(recorded_run(path / "run", lines, **sections)), trace)


def pipeline(limit: int) -> WorkerTrace:
    """Ten steps of 1 s; generation of a batch begins 2 s before its step, and its weights are in use 0.5 s after it."""
    slices = []
    arrows = []
    for number in range(10):
        generated = Slice("generation0.0", number % 2, "generate", number - 2.0, number - 0.5)
        trained = Slice("training0.0", 0, "step", float(number), number + 1.0)
        in_use = Slice("generation0.0", 2, "flip", number + 1.25, number + 1.5, number + 1)
        slices += [generated, trained, in_use]
        arrows += [Arrow("samples", generated, trained), Arrow("weights", trained, in_use)]
    return WorkerTrace(sorted(slices, key=lambda each: each.begin), arrows, 0)


def test_shares_are_weighted_by_the_length_of_steps_without_the_warm_up(tmp_path: Path) -> None:
    slow = steps([100.0, 1.0, 1.0, 1.0, 1.0, 1.0], training={"busy": 0.2})
    slow[5] |= spent("training", busy=0.8)
    slow[5]["time"] += 2.0
    found = overlap_in(tmp_path, slow)
    assert found.steps == 5
    assert found.step == pytest.approx(7.0 / 5)
    assert found.shares["training"]["busy"] == pytest.approx((4 * 0.2 + 3 * 0.8) / 7)
    assert found.tokens == pytest.approx(500 / 7)


def test_the_slowest_stage_is_the_efficiency_and_evaluation_is_no_stage(tmp_path: Path) -> None:
    services = {"generation": {"busy": 0.9}, "training": {"busy": 0.6}, "evaluation": {"busy": 1.0}}
    sections = {"generation": {"device": "cuda:0"}, "training": {"device": "cuda:1"}}
    found = overlap_in(tmp_path, steps([1.0] * 12, **services), **sections)
    assert found.slowest == "generation"
    assert found.efficiency == pytest.approx(0.9)
    assert found.goodput == pytest.approx(100 / 3), "two GPUs and the CPU of the reward worker"
    assert found.bound_efficiency is None


@pytest.mark.parametrize(("limit", "efficiency"), [(0, 1.0), (2, 3.5 / 3), (6, 0.5)])
def test_the_staleness_limit_explains_what_littles_law_says(tmp_path: Path, limit: int, efficiency: float) -> None:
    lines = steps([1.0] * 12, generation={"busy": 0.5}, training={"busy": 0.5})
    found = overlap_in(tmp_path, lines, pipeline(limit), staleness={"limit": limit})
    assert found.cycle == pytest.approx(3.5)
    assert found.bound_efficiency == pytest.approx(min(1.0, efficiency))


def test_overlap_is_the_time_in_which_both_ran() -> None:
    generated = [Slice("generation0.0", row, "generate", row * 1.0, row + 2.0) for row in range(3)]
    trained = [Slice("training0.0", 0, "step", begin, end) for begin, end in ((-1.0, -0.5), (3.0, 5.0))]
    prefetch = Slice("training0.0", 0, "prefetch", 0.0, 9.0)
    assert overlap_fraction(*busy_intervals([*generated, *trained, prefetch])) == pytest.approx(1.0 / 2.5)
    assert overlap_fraction(*busy_intervals([*generated, *trained[1:]])) == 1.0, "before the first step is warm-up"
    assert overlap_fraction(*busy_intervals(generated)) is None
    assert cycle_seconds([]) is None


@pytest.mark.parametrize(
    ("services", "said"),
    [
        (
            {"generation": {"busy": 0.95}, "training": {"busy": 0.4}},
            "it is the bottleneck. It gets shorter by more work",
        ),
        (
            {"generation": {"busy": 0.3}, "reward": {"busy": 0.92}},
            r"reward is busy 92% .*\(reward.replicas, reward.work",
        ),
        ({"generation": {"busy": 0.6, "blocked": 0.3}}, "gate holds it back for 30%: raise staleness.limit"),
        ({"training": {"busy": 0.6, "sync": 0.35}}, "exchanges weights or gradients for 35%"),
        ({"training": {"busy": 0.6, "overhead": 0.35}}, "the runtime takes 35%"),
        (
            {"training": {"busy": 0.5}, "generation": {"busy": 0.45}},
            "stages take turns, as generation is busy only 45%",
        ),
        ({"training": {"busy": 0.85, "sync": 0.07}}, "no single wait takes a tenth"),
    ],
)
def test_the_bottleneck_is_named_with_what_to_change(
    tmp_path: Path, services: dict[str, dict[str, float]], said: str
) -> None:

    assert re.search(said, bottleneck(overlap_in(tmp_path, steps([1.0] * 12, **services))))


def test_runs_that_say_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="trained 5 steps; shares say something from 6 steps on"):
        overlap_in(tmp_path, steps([1.0] * 5, training={"busy": 0.5}))
    lines = steps([1.0] * 12, training={"busy": 0.5})
    for line in lines:
        line["time/training/sync"] = 0.5
    with pytest.raises(ConfigError, match=r"the states of training add up to 1\.5000"):
        overlap_in(tmp_path / "other", lines)


def test_the_slowest_step_is_explained_by_what_took_longer(tmp_path: Path) -> None:
    lines = steps([1.0] * 8, training={"busy": 0.5}, reward={"busy": 0.2})
    for line in lines[5:]:
        line["time"] += 3.0
    lines[5] |= spent("training", busy=0.125, sync=0.75) | {"tokens/trained": 400.0}
    run = read_run(recorded_run(tmp_path / "run", lines))
    head, first, *others = finished_runs.explain(run)
    assert head == "step 6 took 4.000 s, 4.0 times the median of 1.000 s"
    assert first == "  training was sync for 3.000 s, 3.000 s longer than usual"
    assert others[0] == "  reward was starved for 3.200 s, 2.400 s longer than usual"
    assert others[-1] == "  it trained 400 tokens, and the median step 100"
    assert finished_runs.explain(run, 3)[1].startswith("  no state of a service took noticeably longer")
    with pytest.raises(ConfigError, match="has steps 2 to 8, and not 1"):
        finished_runs.explain(run, 1)


def test_the_commands_print_and_refuse(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = []
    for name, length in (("slow", 2.0), ("fast", 1.0)):
        lines = steps([length] * 12, generation={"busy": 0.9}, training={"busy": 0.5})
        runs.append(str(recorded_run(tmp_path / name, lines)))
    comparison.main(runs)
    said = capsys.readouterr().out
    assert "overlap efficiency 0.900 (step over slowest stage 1.11)" in said
    assert [line.split()[:4] for line in said.splitlines()[-2:]] == [
        ["slow", "2.000", "1.00", "50"],
        ["fast", "1.000", "2.00", "100"],
    ]
    for name in ("overlap", "why"):
        monkeypatch.setattr(sys, "argv", ["asyncrl-bench", name, str(tmp_path)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert ended.value.code == 2
        assert capsys.readouterr().err.startswith(f"asyncrl-bench: {tmp_path} is a folder of runs: name one")
