"""Packages have pinned versions and come from one index for each name; models that others packed have digests."""

import re
import tomllib
from collections import Counter
from pathlib import Path

import pytest

from asyncrl.config.install_hints import PACKAGED
from asyncrl.engines.models import model_preparation
from asyncrl.errors import ConfigError

ROOT = Path(__file__).parents[3]


def name_of(requirement: str) -> str:
    return re.split(r"[\s\[<>=!~;]", requirement)[0].lower().replace("_", "-")


def test_constraints_name_the_packages_of_all_extras() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [name_of(each) for listed in project["optional-dependencies"].values() for each in set(listed)]
    own = {name_of(each) for each in project["dependencies"]}
    pins = {name_of(line): line for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line}
    ranges = [each for listed in project["optional-dependencies"].values() for each in listed]
    by_name = Counter(name_of(each) for each in set(ranges))
    of_one_extra_each = {name for name, count in by_name.items() if count > 1}  # No pin fits two ranges.
    assert {*extras, *own} - {*pins, "asyncrl"} <= of_one_extra_each & {"cuda-bindings"}


def test_the_image_asks_one_index_for_a_name() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert "--extra-index-url" not in text
    assert re.search(r"--no-deps [^&]*--index-url \S+ torch ", text)


def test_a_model_of_a_package_is_the_file_that_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, requirement, file, digest = PACKAGED["smollm2"]
    assert re.fullmatch("[0-9a-f]{64}", digest)
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").write_text("")
    (tmp_path / module / file).write_bytes(b"GGUF of somebody else")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(model_preparation, "missing_model_packages", lambda name: ())
    with pytest.raises(ConfigError, match=rf"is not the file of {re.escape(requirement)}.*install the package again"):
        model_preparation._unpack("smollm2", tmp_path / "making", print)
