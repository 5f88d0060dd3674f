"""Numbers of workers that `asyncrl scale` asked for, and what a resume makes of them."""

from dataclasses import replace
from pathlib import Path

import pytest

from asyncrl.deploy.process.run_commands import Scaled, keep, scaled_specs
from asyncrl.errors import ConfigError
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.protocols.service_contracts import Generation, Reward, Training

GENERATION = ServiceSpec("generation", Generation, "x:Y", replicas=2, joined=2)
SPECS = (GENERATION, ServiceSpec("reward", Reward, "x:Y"), ServiceSpec("training", Training, "x:Y"))


def begun(file: Path, *specs: ServiceSpec) -> tuple[list[tuple[str, int, int]], str]:
    """Returns name, replicas and awaited workers of each service that a start has, and what it says."""
    said: list[str] = []
    found = scaled_specs(specs or SPECS, file, said.append)
    return [(spec.name, spec.replicas, spec.joined) for spec in found], "\n".join(said)


def test_a_resume_begins_with_the_numbers_of_the_last_start(tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    assert begun(file) == ([("generation", 2, 2), ("reward", 1, 0), ("training", 1, 0)], "")
    keep(file, "reward", Scaled(config=1, workers=3))
    keep(file, "generation", Scaled(config=2, workers=1))
    numbers, said = begun(file)
    assert numbers == [("generation", 1, 1), ("reward", 3, 0), ("training", 1, 0)], "one host is enough to begin"
    assert "reward begins with 3 workers, as `asyncrl scale` left it; its config says 1" in said
    keep(file, "generation", Scaled(config=2, workers=4))
    assert begun(file)[0][0] == ("generation", 4, 2), "only the workers of fleet.joined are waited for"


def test_the_number_of_the_config_is_nothing_to_keep(tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    keep(file, "reward", Scaled(config=1, workers=3))
    keep(file, "reward", Scaled(config=1, workers=1))
    assert begun(file)[1] == ""


def test_a_config_that_was_changed_since_counts(tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    keep(file, "generation", Scaled(config=2, workers=3))
    numbers, said = begun(file, replace(GENERATION, replicas=5))
    assert numbers == [("generation", 5, 2)]
    assert "generation begins with 5 workers, as its config says since; `asyncrl scale` left it with 3" in said


def test_a_number_that_cannot_be_any_more_gives_way_and_is_named(tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    keep(file, "generation", Scaled(config=2, workers=3))
    numbers, said = begun(file, replace(GENERATION, devices=[("cuda:0",), ("cuda:1",)]))
    assert numbers == [("generation", 2, 2)]
    assert "left it with 3: generation=3 needs a GPU for each worker" in said


@pytest.mark.parametrize("content", ["{", "[]", '{"generation": 3}', '{"generation": {"workers": 3}}'])
def test_a_damaged_file_is_named(content: str, tmp_path: Path) -> None:
    file = tmp_path / "scaled.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match=r"scaled\.json is damaged .*: delete it to begin with the config's workers"):
        begun(file)
