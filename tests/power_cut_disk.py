"""A disk that forgets at a power cut what was not fsynced, names of files included."""

import os
from pathlib import Path

import pytest


class Disk:
    """Remembers what is on the disk: contents of files and names in directories, as they were at their last fsync."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._contents: dict[int, bytes] = {}
        self._names: dict[int, dict[str, tuple[int, bool]]] = {}
        for name in ("fsync", "fdatasync"):
            whole = getattr(os, name)
            patch.setattr(os, name, lambda descriptor, whole=whole: (whole(descriptor), self._synced(descriptor)))

    def _synced(self, descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        inode = path.stat().st_ino
        if path.is_dir():
            self._names[inode] = {each.name: (each.stat().st_ino, each.is_dir()) for each in path.iterdir()}
        else:
            self._contents[inode] = path.read_bytes()

    def has(self, path: Path) -> bool:
        """Returns whether the disk would remember what this file holds now."""
        return self._contents.get(path.stat().st_ino) == path.read_bytes()

    def after_power_cut(self, folder: Path, inode: int) -> Path:
        """Makes the folder again as the disk remembers the one with this inode."""
        folder.mkdir()
        for name, (found, is_folder) in self._names.get(inode, {}).items():
            if is_folder:
                self.after_power_cut(folder / name, found)
            else:
                (folder / name).write_bytes(self._contents.get(found, b""))
        return folder
