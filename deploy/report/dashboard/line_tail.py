"""Follows a file of JSON lines that a run appends to."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncrl.telemetry.jsonl import Object

FIRST_BYTES = 64 << 20
"""Bytes at the end of a file that are read at first: a run that recorded more shows its newest samples."""
BYTES_AT_ONCE = 64 << 20
"""Bytes of one look, which bounds its memory; the next look reads on."""


@dataclass
class LineTail:
    """Reads what was appended since the look before. A file that became shorter is read anew: `restarts` counts that.
    damaged: lines that held no JSON object and were left out."""

    path: Path
    restarts: int = 0
    damaged: int = 0
    _at: int = -1

    def new(self) -> Iterator[tuple[int, int, Object]]:
        """Yields place, length and content of each complete line that was not read before."""
        try:
            size = self.path.stat().st_size
            if self._at > size:
                self.restarts += 1
            cut = self._at < 0 or self._at > size
            begin = max(0, size - FIRST_BYTES) if cut else self._at
            with self.path.open("rb") as file:
                file.seek(begin)
                data = file.read(min(size - begin, BYTES_AT_ONCE))
        except (FileNotFoundError, NotADirectoryError):
            return
        whole = data.rfind(b"\n") + 1
        torn_first = data.find(b"\n") + 1 if cut and begin else 0
        self._at = begin + whole
        yield from self._parsed(data[torn_first:whole], begin + torn_first)

    def _parsed(self, data: bytes, place: int) -> Iterator[tuple[int, int, Object]]:
        for line in data.splitlines(keepends=True):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                yield place, len(line), found
            else:
                self.damaged += 1
            place += len(line)
