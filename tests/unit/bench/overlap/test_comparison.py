"""Comparisons of modes: gains over named baselines, refusals, and the table of a run on the virtual clock."""

import re
import sys
from pathlib import Path

import pytest

from asyncrl.bench.measurements import MachineLoad
from asyncrl.bench.overlap import comparison, finished_runs
from asyncrl.bench.overlap.accounting import Overlap
from asyncrl.bench.overlap.comparison import best_baseline, calibrated, gains, page, stage_times
from asyncrl.bench.overlap.side_run import SideRequest, side_config, sides_of
from asyncrl.config.sources import read
from asyncrl.deploy.report.run_record import read_run
from asyncrl.errors import ConfigError

sys.path.insert(0, str(Path(__file__).parent))
from emulated_runs import overlap_in, virtual_overlap


def run(step: float, generation: float, training: float, tokens: float = 100.0) -> Overlap:
    """A run whose steps train so many tokens; its stages are busy for so many seconds of a step."""
    states = ("starved", "blocked", "sync", "overhead", "unaccounted")
    shares = {
        name: {"busy": busy / step} | dict.fromkeys(states, 0.0) | {"starved": 1.0 - busy / step}
        for name, busy in (("generation", generation), ("training", training))
    }
    return Overlap("run", shares, step, 20, tokens / step, 1, 2, None, None, 0.0)


FOUND = {
    "synchronous, 1 thread": [run(4.0, 2.0, 2.0), run(8.0, 4.0, 4.0)],
    "synchronous, 2 threads": [run(3.6, 2.0, 1.6), run(7.0, 3.8, 3.2)],
    "one-step-off": [run(3.0, 2.2, 2.2), run(6.0, 4.4, 4.4)],
    "limit 2": [run(4.4, 4.2, 4.4, tokens=200.0), run(4.4, 4.2, 4.4)],
}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)


def test_gains_are_over_named_baselines_of_the_same_round_and_the_same_tokens() -> None:
    sides = sides_of("real", [2])
    assert [side.name for side in sides] == list(FOUND)
    assert best_baseline(sides, FOUND) == "synchronous, 2 threads"
    own = gains("limit 2", sides, FOUND)
    assert own.speedups["synchronous, 1 thread"].values == pytest.approx((4.0 / 2.2, 8.0 / 4.4))
    assert own.speedups["synchronous, 2 threads"].values == pytest.approx((3.6 / 2.2, 7.0 / 4.4))
    assert own.overlap_yield.values == pytest.approx((1.4 / 1.6, 2.6 / 3.0)), "alone means with one thread a stage"
    assert own.contention["training"].values == pytest.approx((1.1, 1.1))


def test_the_page_has_a_row_a_side_and_names_bottleneck_and_knob() -> None:
    sides = sides_of("real", [2])
    whole, refused = ("\n".join(page(sides, FOUND, refused=each)) for each in (False, True))
    assert "over synchronous, 2 threads" in whole
    assert "limit 2 is fastest: training is busy 100% of the time" in whole
    assert "training.layout" in whole
    assert "over synchronous" not in refused
    assert "yield" not in refused
    assert "limit 2" in refused


def test_a_busy_machine_gets_no_speed_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    emulated = {**FOUND, "synchronous": FOUND["synchronous, 1 thread"]}
    monkeypatch.setattr("asyncrl.bench.overlap.comparison.in_turn", lambda *_: emulated)
    others = {0.09: 0, 0.11: 3}
    for share, status in others.items():
        monkeypatch.setattr(MachineLoad, "others", share)
        with pytest.raises(SystemExit) as ended:
            comparison.main(["quickstart", "--engine", "emulated", "--limits", "2"])
        assert ended.value.code == status
        said = capsys.readouterr().out
        assert ("no speed-up: other processes used 11% of the machine's CPUs" in said) is (status == 3)


def test_an_experiment_on_the_virtual_clock_gains_what_its_schedule_allows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """128 samples of 8 tokens at 0.25 s a token, all at one time, and steps of 2 s."""
    monkeypatch.chdir(tmp_path)
    times = ["mean=8", "sigma=0", "token=0.25", "each=0", "trained_token=0", "step=2", "load=0"]
    flags = ["--limits", "1", "--rounds", "1", "--steps", "12", "--generation.slots", "128"]
    with pytest.raises(SystemExit) as ended:
        comparison.main(["quickstart", "--engine", "virtual", *flags, "--times", *times])
    assert ended.value.code == 0
    rows = {line.split("  ")[1]: line for line in capsys.readouterr().out.splitlines() if line.startswith("  ")}
    numbers = {name: re.findall(r"\d+\.?\d*", row.replace(name, "", 1)) for name, row in rows.items()}
    assert numbers["synchronous"][0] == "4"
    assert numbers["limit 1"][0] == "2"
    assert numbers["limit 1"][6] == "2", "speed-up"
    assert numbers["limit 1"][9] == "1", "yield"
    assert numbers["one-step-off"][6] == "2"


def test_emulated_stages_take_the_times_of_a_run(tmp_path: Path) -> None:
    stages = {"step": 3.0, "score": 0.02, "load": 0.1, "publish": 0.05}
    virtual_overlap(tmp_path / "run", 1, generation=2.0, **stages)
    path = tmp_path / "run"
    times = calibrated(read(path / "config.toml"), read_run(path), path)
    assert times.lengths.mean == 100
    found = (times.token, times.score, times.load, times.publish, times.trained_token * 6400)
    assert found == pytest.approx((0.02, 0.02, 0.1, 0.05, 3.0), rel=1e-3)


@pytest.mark.parametrize(
    ("typed", "why"), [("tokn=1", "there is no 'tokn'; these are there: mean, sigma"), ("token=x", "write a number")]
)
def test_times_that_say_nothing_are_refused(typed: str, why: str) -> None:
    config = side_config(SideRequest("virtual", "quickstart", ""))
    with pytest.raises(ConfigError, match=why):
        stage_times(config, [typed], None)


def test_engines_without_a_critic_are_refused() -> None:
    with pytest.raises(ConfigError, match="no critic and no greedy answers: measure it with --engine real"):
        side_config(SideRequest("emulated", "quickstart", "", values={"algorithm.preset": "ppo"}))


def test_keys_of_the_config_are_for_experiments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--steps\.x: keys of the config are for experiments"):
        comparison.main([str(tmp_path), "--steps.x", "1"])


def test_a_difference_of_two_runs_names_state_and_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, limit in (("before", 0), ("after", 1)):
        virtual_overlap(tmp_path / name, limit, generation=2.0, step=3.0)
    finished_runs.diff([str(tmp_path / "before"), str(tmp_path / "after")])
    said = capsys.readouterr().out
    assert "a step of after takes 2.000 s less" in said
    assert re.search(r"generation +blocked +3\.000 +1\.000 +-2\.000", said)
    assert re.search(r"seconds a step +5\.000 +3\.000 +0\.60", said)
    assert said.endswith("1 keys of the config differ:\n  staleness.limit: 0, 1\n")
    assert overlap_in(tmp_path / "after").step == pytest.approx(3.0)
