"""Versions as safetensors files in a folder that trainer and engines see: for hosts that share a file system only.

A file appears under its name when it is whole, and the newest few stay. Receivers copy it into memory of their own.
"""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from asyncrl.errors import FleetFailed, PeerLost, Refused, WeightsError, errno_in
from asyncrl.lanes.host_id import HostId
from asyncrl.lanes.weights.leases import CopiedVersions, Fetched, Leases, slot_of
from asyncrl.lanes.weights.slot_memory import (
    WeightsSpec,
    check_digest,
    checked,
    digest,
    digested_tensor,
    fill,
    views,
    with_aliases,
)
from asyncrl.lanes.weights.transports.version_transfer import in_thread, new_memory, transfer_seconds
from asyncrl.lanes.weights.version_folder import make_folder
from asyncrl.protocols.messages import Published
from asyncrl.protocols.weight_transports import SLOTS

FILE_SCHEME = "file://"
NAME = "weights"
"""Begins the name of every file."""
KEPT = 2
"""Files of a trainer that stay: the newest, and the one before, which a receiver may be reading."""
CAUSES = {
    errno.ENOENT: "the folder was removed while the run used it",
    errno.ENOSPC: "the disk is full; make room there, or name another folder",
    errno.EDQUOT: "the disk quota is used up; make room there, or name another folder",
}
"""Usual reasons for which a version cannot be written, by error number."""


class FileSender:
    """Implements WeightSender in a folder, which it makes. Nobody else may write there. Raises ConfigError when the
    folder cannot be made."""

    def __init__(self, folder: Path, spec: WeightsSpec) -> None:
        self.leases: Leases = CopiedVersions()
        self._folder = folder.absolute()
        self._spec = spec
        self._slot = torch.from_numpy(new_memory(spec))
        self._tensors = views(self._slot, spec)
        self._files: list[Path] = []
        make_folder(self._folder)

    def write(self, incarnation: int, version: int, named_tensors: Mapping[str, Tensor]) -> Published:
        """Implements WeightSender; the file is on disk when it returns. Raises FleetFailed when that fails."""
        tensors = checked(named_tensors, self._spec)
        fill(self._tensors, tensors)
        path = self._folder / _file_name(incarnation, version)
        try:
            self._save(path)
        except (OSError, SafetensorError) as failed:
            number = failed.errno if isinstance(failed, OSError) else errno_in(str(failed))
            raise FleetFailed(
                f"weights of version {version} could not be written to {self._folder} (weights.folder): "
                f"{CAUSES.get(number or 0, failed)}"
            ) from failed
        self._files = [*self._files, path][-KEPT:]
        self._remove_others()
        digest_of = digested_tensor(self._spec, version)
        found = digest(self._slot, self._spec, digest_of)
        address = f"{FILE_SCHEME}{self._folder}"
        seconds = transfer_seconds(self._spec.size)
        return Published(incarnation, version, address, slot_of(version), found, digest_of, transfer=seconds)

    def _remove_others(self) -> None:
        """Removes older versions, and those that a trainer that died before this one has left."""
        for each in self._folder.glob(f"{NAME}-*"):
            if each not in self._files:
                each.unlink(missing_ok=True)

    def _save(self, path: Path) -> None:
        """Writes the slot to a draft on disk, which then gets the name of the file."""
        draft = path.with_suffix(".draft")
        save_file(self._tensors, draft, {"layout": self._spec.digest.hex()})
        with open(draft, "rb") as written:
            os.fsync(written.fileno())
        draft.replace(path)

    def forget(self, reader: str) -> None:
        """Does nothing: readers leave no trace."""

    def close(self) -> None:
        for path in self._files:
            path.unlink(missing_ok=True)


class FileReceiver:
    """Implements WeightReceiver: copies a version out of its file into the slot that does not serve.

    Invariant: the slot whose tensors were handed out last is not written before `tensors` has returned the next one.
    """

    reopens = True

    def __init__(self, spec: WeightsSpec) -> None:
        self._spec = spec
        self._slots = [torch.from_numpy(new_memory(spec)) for _ in range(SLOTS)]
        self._held: list[tuple[int, int] | None] = [None] * SLOTS
        self._used = 0

    async def fetch(self, published: Published) -> Fetched:
        if (published.incarnation, published.version) in self._held:
            return Fetched()
        await in_thread(self._spec.size, lambda: self._read(published))
        return Fetched(self._spec.size)

    def tensors(self, published: Published) -> dict[str, Tensor]:
        self.check(published)
        self._used = self._held.index((published.incarnation, published.version))
        return with_aliases(views(self._slots[self._used], self._spec), self._spec)

    def check(self, published: Published) -> None:
        if (published.incarnation, published.version) not in self._held:
            raise WeightsError(f"weights of version {published.version} were not fetched from {published.arena}")

    def close(self) -> None:
        """Does nothing: the memory goes with its last view."""

    def _read(self, published: Published) -> None:
        """Copies the file into the idle slot."""
        folder = Path(published.arena.removeprefix(FILE_SCHEME))
        idle = self._used if self._held[self._used] is None else 1 - self._used
        self._held[idle] = None
        targets = views(self._slots[idle], self._spec)
        path = folder / _file_name(published.incarnation, published.version)
        try:
            with safe_open(path, framework="pt") as file:
                if (file.metadata() or {}).get("layout") != self._spec.digest.hex():
                    raise WeightsError(f"{path} has weights of another model or dtype than this reader's")
                for name, target in targets.items():
                    read = file.get_tensor(name)
                    if (read.shape, read.dtype) != (target.shape, target.dtype):
                        raise WeightsError(f"{path} is damaged: {name} has another shape or dtype")
                    target.copy_(read)
        except (FileNotFoundError, NotADirectoryError) as gone:
            if not folder.is_dir():
                raise WeightsError(
                    f"{folder} was removed, or is not seen on host {HostId.here().name}: name a folder in "
                    "weights.folder that all hosts see"
                ) from gone
            if not any(folder.iterdir()):
                raise PeerLost(f"{folder} has no weights: its trainer has ended") from gone
            raise Refused(f"{path} was removed: there is a newer version") from gone
        except SafetensorError as damaged:
            raise WeightsError(f"{path} is damaged: {damaged}") from damaged
        except OSError as unreadable:
            why = f"{path} cannot be read on host {HostId.here().name}: {unreadable.strerror or unreadable}"
            raise WeightsError(why) from unreadable
        check_digest(self._slots[idle], self._spec, published)
        self._held[idle] = (published.incarnation, published.version)


def _file_name(incarnation: int, version: int) -> str:
    return f"{NAME}-{incarnation}-{version}.safetensors"
