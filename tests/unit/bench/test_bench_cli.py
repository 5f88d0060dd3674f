from importlib import import_module

import pytest

from asyncrl.bench.cli import BENCHMARKS


@pytest.mark.parametrize("name", BENCHMARKS)
def test_each_measurement_that_is_listed_can_be_run(name: str) -> None:
    assert callable(import_module(f"asyncrl.bench.{BENCHMARKS[name][0]}").main)
