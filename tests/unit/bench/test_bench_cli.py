import subprocess
import sys
from importlib import import_module

import pytest

from asyncrl.bench import generation_speed
from asyncrl.bench.cli import BENCHMARKS, main


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_measurement_that_is_listed_can_be_run(name: str) -> None:
    module, _, function = BENCHMARKS[name][0].partition(":")
    assert callable(getattr(import_module(f"asyncrl.bench.{module}"), function or "main"))


COUNTS = {
    "channels": ["rounds"],
    "lanes": ["calls", "probes", "messages"],
    "end-to-end": ["rounds", "steps"],
    "generation": ["rounds", "slots"],
    "overhead": ["rounds", "steps", "traced-steps"],
    "start": ["rounds"],
    "weights": ["rounds", "copies"],
    "scale": ["rounds", "largest"],
    "sandbox": ["rounds", "programs"],
    "episodes": ["rounds", "episodes", "children"],
    "learning": ["runs"],
}


def refused(arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """The last line of a measurement that ends before it begins."""
    monkeypatch.setattr(sys, "argv", ["asyncrl-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    return capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("value", ["0", "-1", "many"])
@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name, flags in COUNTS.items() for flag in flags])
def test_a_count_of_nothing_is_refused(
    name: str, flag: str, value: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused([name, f"--{flag}={value}"], monkeypatch, capsys)
    assert f"asyncrl-bench {name}: error: argument --{flag}: must be a whole number of" in said


def test_vllm_that_is_missing_is_named_with_its_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generation_speed, "find_spec", lambda name: None)
    said = refused(["generation", "--engine", "vllm"], monkeypatch, capsys)
    assert "vLLM is not in this environment; run scripts/set-up-vllm" in said


@pytest.mark.parametrize(("arguments", "status"), [([], 0), (["--help"], 0), (["nope"], 2), (["--nope"], 2)])
def test_a_name_that_is_no_benchmark_is_an_error_that_lists_them(
    arguments: list[str], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncrl-bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr()
    help_text, other = (printed.out, printed.err) if status == 0 else (printed.err, printed.out)
    assert ended.value.code == status
    assert all(name in help_text for name in BENCHMARKS)
    assert not other
    assert (f"there is no benchmark {arguments[0]!r}" if status else "usage:") in help_text


def test_a_finished_study_is_named_with_where_its_results_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["asyncrl-bench", "regroup"])
    with pytest.raises(SystemExit, match="2"):
        main()
    assert "regroup is a finished study, which was removed; its results stand in docs/log.md" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_a_benchmark_quietly() -> None:
    code = "import sys; from asyncrl.bench import cli; sys.argv[1:] = ['why']; "
    code += (
        "cli.import_module = lambda name: type('M', (), {'why': lambda rest: print('line\\n' * 100_000)}); cli.main()"
    )
    command = f'{sys.executable} -c "$0" | head -1'
    done = subprocess.run(["bash", "-c", command, code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("line\n", "")
