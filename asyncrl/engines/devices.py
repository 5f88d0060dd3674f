"""Whether torch can compute where a config says: `python -m asyncrl.engines.devices KEY=DEVICE ...` prints a line for
each that it cannot, for those who must not import torch."""

import sys

import torch

from asyncrl.errors import ConfigError


def refuse_unusable(key: str, device: str) -> None:
    """Raises ConfigError: torch has no such device here; names the key, the reason and what to write instead."""
    try:
        torch.zeros(1, device=device)
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f'{key} = "{device}" cannot be used: {why}. {_instead(device)}') from error


def _instead(device: str) -> str:
    if not device.startswith("cuda"):
        return 'Write "cpu", "cuda" or "cuda:0"'
    if torch.version.cuda is None:
        return f'This torch ({torch.__version__}) is built without CUDA: install one that has it, or write "cpu"'
    if (count := torch.cuda.device_count()) > 0:
        return f'There are "cuda:0" to "cuda:{count - 1}"'
    return 'torch finds no GPU (does `nvidia-smi` list one?): make it visible, or write "cpu"'


def main(asked: list[str]) -> None:
    for key, _, device in (each.partition("=") for each in asked):
        try:
            refuse_unusable(key, device)
        except ConfigError as error:
            sys.stdout.write(f"{error}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
