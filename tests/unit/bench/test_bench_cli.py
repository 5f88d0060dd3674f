import sys
from importlib import import_module

import pytest

from asyncrl.bench.cli import BENCHMARKS, main


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_measurement_that_is_listed_can_be_run(name: str) -> None:
    assert callable(import_module(f"asyncrl.bench.{BENCHMARKS[name][0]}").main)


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
