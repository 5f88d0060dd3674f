"""Packages have pinned versions and come from one index for each name; models that others packed have digests."""

import re
import tomllib
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from asyncrl.config.install_hints import ENCODER_FILES, PACKAGED
from asyncrl.engines.models import model_preparation
from asyncrl.errors import ConfigError, RewardError
from asyncrl.tasks.builtin import dialogue_rewards

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


def locked(name: str) -> dict[str, str]:
    """Returns the version of each package of a lock. Fails for a line without one version and one SHA-256."""
    lines = [line for line in (ROOT / "deploy" / name).read_text().splitlines() if not line.startswith("#")]
    found = [re.fullmatch(r"([a-z0-9._-]+)==([0-9][\w.]*) --hash=sha256:[0-9a-f]{64}", line) for line in lines]
    assert all(found), [line for line, each in zip(lines, found, strict=True) if each is None]
    return {name_of(each[1]): each[2] for each in found if each is not None}


def pinned() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return {name_of(line): line.split("==")[1] for line in lines if "==" in line}


def test_the_image_has_a_hash_for_every_package_it_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    image = locked("image.lock")
    build = locked("build.lock")
    assert {name_of(each) for each in project["project"]["dependencies"]} <= {*image, "torch"}
    assert {name_of(each) for each in project["build-system"]["requires"]} <= build.keys()
    pins = pinned()
    unlike = {name: version for name, version in (image | build).items() if pins.get(name, version) != version}
    assert unlike == {}, "run scripts/lock-image"
    dockerfile = (ROOT / "deploy/Dockerfile").read_text()
    assert re.search(rf'^ARG TORCH="torch=={re.escape(pins["torch"])} --hash=sha256:[0-9a-f]{{64}}"$', dockerfile, re.M)


def test_the_image_installs_wheels_with_hashes_and_builds_with_hashes() -> None:
    text = (ROOT / "deploy/Dockerfile").read_text()
    assert not re.search(r"^ARG BASE_IMAGE=(?!\S+@sha256:[0-9a-f]{64}$|\S+:\d+\.\d+\.\d+-\S+$)", text, re.M)
    for name in ("image.lock", "build.lock"):
        (command,) = [
            each for each in re.split("&&|^RUN", text, flags=re.M) if re.search(rf"--requirement \S*{name}", each)
        ]
        assert {"--require-hashes", "--no-deps", "--only-binary"} <= set(command.split())
    assert re.search(r"--no-deps [^&]*--index-url \S+ [^&]*--requirement torch.lock", text)
    assert "--no-build-isolation" in text, "isolation would fetch what builds the package without hashes"


def test_no_name_is_asked_for_at_two_indexes() -> None:
    files = [ROOT / "docker-compose.yml", *(ROOT / "scripts").rglob("*"), *(ROOT / "deploy").rglob("*")]
    texts = {path.name: path.read_text() for path in files if path.is_file() and path.suffix != ".pyc"}
    assert {"Dockerfile", "set-up-vllm", "test-containers", "lock-image"} <= texts.keys()
    assert [name for name, text in texts.items() if re.search("extra-index-url|EXTRA_INDEX_URL", text)] == []


@pytest.mark.parametrize(("name", "least"), [("jinja2", (3, 1, 6)), ("pillow", (11, 3))])
def test_lower_bounds_leave_out_versions_with_known_holes(name: str, least: tuple[int, ...]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = [
        *project["dependencies"],
        *(each for extra in project["optional-dependencies"].values() for each in extra),
    ]
    bounds = [each.split(">=")[1] for each in listed if name_of(each) == name]
    assert bounds
    assert all(tuple(map(int, bound.split("."))) >= least for bound in bounds)


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


@pytest.mark.parametrize("damage", ["other", "gone"])
@pytest.mark.parametrize("name", ENCODER_FILES)
def test_the_model_that_tells_relevance_is_the_one_that_is_known(
    name: str, damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    contents = {each: f"content of {each}".encode() for each in ENCODER_FILES}
    known = {each: sha256(content).hexdigest() for each, content in contents.items()}
    monkeypatch.setattr(dialogue_rewards, "ENCODER_FILES", known)
    module, requirement = dialogue_rewards.MODEL
    (folder := tmp_path / module / "model").mkdir(parents=True)
    (tmp_path / module / "__init__.py").write_text("")
    for each, content in contents.items():
        (folder / each).write_bytes(content)
    if damage == "other":
        (folder / name).write_bytes(b"of somebody else")
    else:
        (folder / name).unlink()
    monkeypatch.syspath_prepend(str(tmp_path))
    dialogue_rewards._encoder.cache_clear()
    why = f"{name} is not the file of {requirement}" if damage == "other" else f"No such file.*{name}"
    with pytest.raises(RewardError, match=f"{why}.*install the package again"):
        dialogue_rewards._encoder()
