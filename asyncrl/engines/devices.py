"""Checks that torch can compute on the configured devices. `python -m asyncrl.engines.devices KEY=DEVICE ...` prints a
line for each unusable device, so that processes that must not import torch can run the check in a child."""

import sys

import torch

from asyncrl.errors import ConfigError


def refuse_unusable(key: str, device: str) -> None:
    """Raises ConfigError when torch cannot use the device; the error names the key, the reason and a valid value."""
    try:
        torch.ones(1, device=device).item()  # A tensor on "meta" can be made, and has no value.
    except (AssertionError, RuntimeError, NotImplementedError) as error:
        why = str(error).strip().partition("\n")[0].rstrip(".")
        raise ConfigError(f'{key} = "{device}" cannot be used: {why}. {_suggestion(device)}') from error


def _suggestion(device: str) -> str:
    if not device.startswith("cuda"):
        return 'Write "cpu", "cuda" or "cuda:0"'
    if torch.version.cuda is None:
        return f'This torch ({torch.__version__}) is built without CUDA: install one that has it, or write "cpu"'
    if (count := torch.cuda.device_count()) > 0:
        return f'There are "cuda:0" to "cuda:{count - 1}"'
    return 'torch finds no GPU (does `nvidia-smi` list one?): make it visible, or write "cpu"'


if __name__ == "__main__":
    for asked in sys.argv[1:]:
        try:
            refuse_unusable(*asked.split("=", 1))
        except ConfigError as error:
            sys.stdout.write(f"{error}\n")
