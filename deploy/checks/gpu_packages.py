"""Checks the packages of the extras cu12 and cu13: an environment may have one of the two, as their wheels of NCCL
write one file. Imports only the standard library, as machine.py does."""

from collections.abc import Callable, Iterator, Mapping

from asyncrl.config.install_hints import install_extra, pip_uninstall
from asyncrl.config.problems import Problem
from asyncrl.deploy.checks.machine import installed

PAIRS = (("nvidia-nccl-cu12", "nvidia-nccl-cu13"), ("cupy-cuda12x", "cupy-cuda13x"))
"""Packages of the two extras that write the same files."""


def gpu_package_problems(
    devices: Mapping[str, str], version: Callable[[str], str | None] = installed
) -> Iterator[Problem]:
    """Yields a problem for each two packages that overwrite each other, a warning where no service is on a GPU.
    devices: by config key. version: of a distribution, None without one."""
    on_cpu = all(device == "cpu" for device in devices.values())
    for older, newer in PAIRS:
        if (first := version(older)) and (second := version(newer)):
            text = (
                f"{older} {first} and {newer} {second} are both installed and write the same files, so what was built "
                f"for one runs with the other: run {pip_uninstall(older, newer)}, then {install_extra('cu12')}, or for "
                f"a torch of CUDA 13 {install_extra('cu13')}"
            )
            yield Problem("", "", text, is_warning=on_cpu)
