"""A run directory of somebody else is looked at: none of the code that it names is run."""

import sys
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.tasks.prompt_sources import runs_code
from tests.unit.deploy.report.recorded_runs import SAMPLE, recorded_run, step

CODE = """
from pathlib import Path
Path(__file__).with_name("ran").write_text("")

def rows(**options):
    return [{"prompt": "p", "answer": "a"}]

def weights(*given):
    return [1.0]
"""
SOURCES = {
    "file": '"{file}:rows"',
    "mixed": '[{{ use = "{file}:rows" }}, {{ use = "asyncrl.tasks.builtin.reverse:training" }}]',
    "module": '"evil:rows"',
    "loader of ours": '"asyncrl.config.user_code:resolve"',
    "curriculum": '"asyncrl.tasks.builtin.reverse:training"\ncurriculum = "{file}:weights"',
}


@pytest.mark.parametrize("more", [[], ["--compare"], ["--parquet", "x.parquet"], ["--parquet", "x.parquet", "--verl"]])
@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_samples_of_a_foreign_run_run_no_code(
    source: str,
    more: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = recorded_run(tmp_path / "runs" / "one", [step(1, 1.0)], [SAMPLE])
    (run / "evil.py").write_text(CODE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(run))
    prompts = source.format(file=run / "evil.py")
    options = f'options = {{ spec = "{run}/evil.py:rows", where = "x" }}\n'
    config = f'[model]\nname = "tiny"\n[task]\nprompts = {prompts}\n{options}[reward]\nfunctions = ["numeric"]\n'
    (run / "config.toml").write_text(config)
    try:
        assert cli.main(["samples", str(run), *more]) == 0
        assert "--run-code runs it" in capsys.readouterr().out
    finally:
        sys.modules.pop("evil", None)
    assert not (run / "ran").exists()


def test_what_makes_rows_without_code_of_anybody_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    data = [
        "rows.jsonl",
        "x.py:rows.jsonl",
        str(tmp_path / "rows"),
        "hub:a/b",
        "asyncrl.tasks.builtin.reverse:training",
    ]
    assert [runs_code(each) for each in data] == [False] * len(data)
    code = ["x.py:rows", "module:rows", "asyncrl.config.user_code:resolve", "asyncrl.tasks:load_prompts", "os:system"]
    assert [runs_code(each) for each in code] == [True] * len(code)
