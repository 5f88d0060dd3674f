"""A file of an experiment may name a function that is called with the metrics of each step."""

from pathlib import Path

import pytest

from asyncrl.config.named_files import source_files
from asyncrl.config.schema import Config
from asyncrl.deploy.preflight import callback_problems, step_callback
from asyncrl.errors import ConfigError

SOURCE = """
def good_enough(metrics):
    return metrics["reward/mean"] > 0.5

async def waits(metrics):
    return True

number = 3
"""


def config(file: Path, name: str) -> Config:
    return Config.model_validate(
        {"model": {"name": "m"}, "task": {"prompts": "p"}, "telemetry": {"on_step": f"{file}:{name}"}}
    )


def test_the_function_of_a_file_is_called_and_the_file_belongs_to_the_run(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    named = config(file, "good_enough")
    assert list(callback_problems(named)) == []
    function = step_callback(named)
    assert function is not None
    assert [function({"reward/mean": mean}) for mean in (0.25, 0.75)] == [False, True]
    assert ("telemetry.on_step", file) in set(source_files(named))
    assert step_callback(Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}})) is None


def test_mistakes_are_told(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(SOURCE)
    (problem,) = callback_problems(config(file, "good_enouhg"))
    assert "did you mean good_enough?" in str(problem)
    for name in ("waits", "number"):
        with pytest.raises(ConfigError, match=rf"^telemetry.on_step: .*:{name}: write a plain function"):
            step_callback(config(file, name))
