"""The controller's end of files: lists those that workers of a service read, and sends parts of them.

host                                   FileServer
trees ───────────────────────────────> digests of the files as they are now
part(sha256, offset) ────────────────> at most PART_BYTES, with a checksum
"""

import asyncio
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from asyncrl.errors import Refused
from asyncrl.lanes.data.files.file_digests import FileDigests
from asyncrl.protocols.join_messages import FilePart, FileTree, ListedFile

PART_BYTES = 1 << 20
"""Bytes of one part: 0.8 s at 10 Mbit/s, and a thousandth of a second on the controller."""


@dataclass(frozen=True, slots=True)
class OfferedFiles:
    """Files of one folder that workers read. use: as in FileTree. names: relative to the folder; none: all below it,
    without those that end in one of `left_out`."""

    folder: Path
    use: str
    names: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    def present(self) -> Iterator[str]:
        """Yields the names of those files that exist."""
        if self.names:
            yield from (name for name in self.names if (self.folder / name).is_file())
            return
        for path in sorted(self.folder.rglob("*")):
            if path.is_file() and not path.name.endswith(self.left_out):
                yield path.relative_to(self.folder).as_posix()


class FileServer:
    """Serves the files of each service to hosts that joined for it. offered: by service."""

    def __init__(self, offered: Mapping[str, Sequence[OfferedFiles]]) -> None:
        self._offered = offered
        self._digests = FileDigests()
        self._paths: dict[tuple[str, str], Path] = {}
        self._computing = asyncio.Lock()

    async def trees(self, service: str) -> list[FileTree]:
        """Returns what workers of a service read, as it is now."""
        if not (offered := self._offered.get(service)):
            return []
        async with self._computing:  # Hosts that join at one time have the digests computed once.
            return await asyncio.to_thread(self._trees, service, offered)

    def _trees(self, service: str, offered: Sequence[OfferedFiles]) -> list[FileTree]:
        trees = []
        for each in offered:
            files = []
            for name in each.present():
                path = each.folder / name
                digest = self._digests.of(path)
                self._paths[service, digest] = path
                files.append(ListedFile(name, path.stat().st_size, digest))
            if files:
                trees.append(FileTree(str(each.folder), each.use, tuple(files)))
        return trees

    async def part(self, service: str, digest: str, offset: int) -> FilePart:
        """Returns the bytes at an offset of a file. Raises Refused for a file that is not offered, or has changed."""
        path = self._paths.get((service, digest))
        if path is None or offset < 0:
            raise Refused(f"no file {digest[:12]} is offered to {service} workers")
        return await asyncio.to_thread(self._read, path, digest, offset)

    def _read(self, path: Path, digest: str, offset: int) -> FilePart:
        try:
            if self._digests.of(path) != digest:
                raise Refused(f"{path} has changed since this host asked for the list of files")
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read(PART_BYTES)
        except OSError as error:
            raise Refused(f"{path} cannot be read any more: {error.strerror}") from error
        return FilePart(data, zlib.crc32(data))
