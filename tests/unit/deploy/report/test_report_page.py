"""The page of a report: its numbers, what it never loads, its size, and the command that writes it."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.config.install_hints import program
from asyncrl.deploy import cli
from asyncrl.deploy.report.curve_charts import positions, staleness_histogram, state_chart
from asyncrl.deploy.report.report_page import facts, report_html, shown_samples
from asyncrl.deploy.report.run_record import RunRecord, binned, read_run
from asyncrl.deploy.run_setup import report_run
from asyncrl.telemetry.logs import WarningFile
from tests import golden
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step

EVALUATION = {"version": 0, "prompts": 8, "mean": 0.25, "stderr": None, "unscorable": 0, "seconds": 0.5}
LIMIT = 5_000_000


def shown_facts(run: RunRecord) -> str:
    return "\n".join(f"{fact.name}: {', '.join(fact.texts)}" for fact in facts([run]))


def test_the_table_says_what_the_metrics_say(tmp_path: Path) -> None:
    lines = [step(n, 2.0 * n, **{"tokens/trained": 100.0, "staleness/max": float(n % 3)}) for n in range(1, 21)]
    lines[-1]["reward/mean"] = lines[-2]["reward/mean"] = 0.75
    run = read_run(recorded_run(tmp_path / "run", lines, evaluations=[EVALUATION]))
    golden.says(shown_facts(run), "2,000", "0.750", "40.0 s", "2 versions")


def test_warnings_stand_above_the_curves_with_one_of_equal_groups(tmp_path: Path) -> None:
    lines = [step(n, 2.0 * n, **{"reward/equal_groups": 1.0}) for n in range(1, 4)]
    path = recorded_run(tmp_path / "run", lines)
    WarningFile(path / "warnings.jsonl", lambda text: None, lambda: 3).warn("guards.no_variance: all got <1>")
    page = report_html([read_run(path)])
    assert page.index("guards.no_variance (once, after step 3): all got &lt;1&gt;") < page.index('<h2 id="curves">')
    assert "Groups that teach nothing" in page


def test_axes_count_minutes_and_hours_of_all_devices(tmp_path: Path) -> None:
    sections = {"generation": {"device": "cuda:0"}, "training": {"device": "cuda:1"}}
    run = read_run(recorded_run(tmp_path / "run", [step(1, 36.0), step(2, 72.0)], **sections))
    assert positions(run, "minutes") == pytest.approx([0.6, 1.2])
    assert positions(run, "device-hours") == pytest.approx([0.03, 0.06])  # Two GPUs, and the CPU of the reward worker.


def test_long_lines_are_averaged_in_bins() -> None:
    points = binned([(float(n), float(n % 2)) for n in range(4001)], 1000)
    assert len(points) <= 1000
    assert (points[0], points[-1]) == ((2.0, 0.4), (4000.0, 0.0))
    assert binned([(1.0, 2.0)], 1000) == [(1.0, 2.0)]
    assert binned([], 1000) == []


def test_shares_are_weighted_by_the_time_of_their_steps(tmp_path: Path) -> None:
    lines = [
        step(1, 1.0, **{"time/training/busy": 1.0, "time/training/starved": 0.0}),
        step(2, 4.0, **{"time/training/busy": 0.0, "time/training/starved": 1.0}),
    ]
    chart = state_chart(read_run(recorded_run(tmp_path / "run", lines)))
    source = chart.renderers[0].data_source.data
    assert (source["service"], source["busy"], source["starved"]) == (["training"], [0.25], [0.75])


def test_ages_are_counted_against_the_weights_that_the_step_trained(tmp_path: Path) -> None:
    samples = [replace(SAMPLE, step=3, first=2), replace(SAMPLE, step=3, first=0), replace(SAMPLE, step=3, trained=0)]
    chart = staleness_histogram(read_run(recorded_run(tmp_path / "run", [step(3, 1.0)], samples)))
    bars = chart.renderers[0].data_source.data
    assert dict(zip(bars["x"], bars["top"], strict=True)) == {0: 1, 2: 1}


def test_what_a_model_wrote_stays_text(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script>"
    samples = [replace(SAMPLE, text=attack, prompt=attack, finish="<b>")]
    run = read_run(recorded_run(tmp_path / "run", [step(1, 1.0)], samples))
    page = report_html([run])
    assert attack not in page
    assert page.count("&lt;/script&gt;&lt;script&gt;alert(1)") == 2


def test_a_long_run_makes_a_page_below_five_megabytes_that_shows_early_and_late_samples(tmp_path: Path) -> None:
    lines = [step(n, float(n), **{"time/training/busy": 1.0, "mismatch/kl": 0.1}) for n in range(1, 5001)]
    samples = [replace(SAMPLE, step=n, text="word " * 1000) for n in range(1, 5001, 5)]
    run = read_run(recorded_run(tmp_path / "run", lines, samples))
    shown = shown_samples(run)
    assert len(shown) <= 120
    assert all(not each.tokens for each in shown), "this run has no tokenizer"
    assert shown[0].record.step > 4900
    assert shown[-1].record.step < 100
    assert "[3000 characters]" in shown[0].text
    assert len(report_html([run]).encode()) < LIMIT


def test_the_command_writes_one_run_and_compares_several(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(recorded_run(tmp_path / name, [step(1, 1.0)])) for name in ("first", "second")]
    assert cli.main(["report", runs[0]]) == 0
    assert capsys.readouterr().out == f"the report is in {runs[0]}/report.html\n"
    assert cli.main(["report", *runs]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h1>first and second</h1>" in page
    assert cli.main(["report", *runs, "--to", str(tmp_path / "none" / "r.html")]) == 2
    assert "cannot be written to" in capsys.readouterr().err


async def test_a_run_says_where_its_report_is_or_why_there_is_none(tmp_path: Path) -> None:
    run = recorded_run(tmp_path / "run", [step(1, 1.0)])
    said = list[str]()
    for path, seconds in ((run, 240.0), (tmp_path / "none", 240.0), (run, 0.01)):
        await report_run(path, said.append, deadline=seconds)
    assert (run / "report.html").exists()
    golden.says("\n".join(said).replace(program(), "asyncrl"))
