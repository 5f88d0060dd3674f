"""asyncrl: reinforcement learning of language models on a fleet of asyncio services.

    import asyncrl
    run = asyncrl.train(model="warmed:reverse", prompts="questions.jsonl", reward=my_function)

Names are loaded when they are used, so that `import asyncrl` costs nothing.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.version import __version__ as __version__

if TYPE_CHECKING:
    from asyncrl.api import RLTrainer, Run, train, train_async
    from asyncrl.config.schema import Config
    from asyncrl.controller.controller import Algorithm
    from asyncrl.environments import Observation
    from asyncrl.errors import AsyncrlError
    from asyncrl.rewards import Sample

__all__ = ["Algorithm", "AsyncrlError", "Config", "Observation", "RLTrainer", "Run", "Sample", "train", "train_async"]

_HOMES = {
    "AsyncrlError": "asyncrl.errors",
    "Config": "asyncrl.config.schema",
    "Algorithm": "asyncrl.controller.controller",
    "Observation": "asyncrl.environments",
    "RLTrainer": "asyncrl.api",
    "Run": "asyncrl.api",
    "Sample": "asyncrl.rewards",
    "train": "asyncrl.api",
    "train_async": "asyncrl.api",
}

if not (Path(__file__).parent / "protocols").is_dir():
    raise ImportError(
        "asyncrl/protocols is no link to ../protocols: this checkout was made without symbolic links "
        "(a ZIP, or git with core.symlinks=false); clone again with: git clone -c core.symlinks=true URL"
    )


def __getattr__(name: str) -> Any:
    if name == "Page":
        raise AttributeError("asyncrl.Page is called asyncrl.Algorithm")
    if name not in _HOMES:
        raise AttributeError(f"asyncrl has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
