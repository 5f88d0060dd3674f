"""Tables of GPUs: those that come with asyncrl, and those of a user."""

import json
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.simulation.cost_model.gpus import gpu_named, known_gpus, read_gpus

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
