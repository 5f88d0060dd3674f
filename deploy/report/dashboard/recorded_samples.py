"""The samples that a run recorded, followed while it appends to them, found by step and group, and read from the file
only when somebody looks at them."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from itertools import islice
from pathlib import Path
from typing import Any

from asyncrl.config.schema import Config
from asyncrl.deploy.report.sample_tokens import Decode, shown_tokens, token_decoder
from asyncrl.telemetry.jsonl import Object
from asyncrl.telemetry.run_directory import RunDirectory
from asyncrl.telemetry.samples_file import BY_TOKEN, TOKEN_FIELDS, SampleRecord

# Follows a file of JSON lines that a run appends to.


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


MAX_GROUPS = 20_000
"""Groups that are remembered, the newest ones: some 300 bytes each."""
PAGE = 40
"""Groups of one page of the list."""
SHOWN_CHARACTERS = 160
"""Characters of a prompt in the list."""
FIELDS = {each.name for each in fields(SampleRecord) if each.default is MISSING and each.default_factory is MISSING}
"""Fields that each line of a sample has; other lines are of another asyncrl, and are left out."""


@dataclass(slots=True)
class RecordedGroup:
    """The samples of one group in one step. places: where their lines are in the file: place and length."""

    step: int
    group: int
    incarnation: int
    skipped: str
    prompt: str
    episode: bool
    rewards: list[float | None] = field(default_factory=list)
    masked: int = 0
    places: list[tuple[int, int]] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """Returns what the list shows."""
        shown = {name: getattr(self, name) for name in ("step", "group", "prompt", "episode", "masked", "skipped")}
        known = [reward for reward in self.rewards if reward is not None]
        return {**shown, "rewards": self.rewards, "mean": sum(known) / len(known) if known else None}


class RecordedSamples:
    """Follows samples.jsonl. A step that a resumed run repeated, or that first trained nothing, counts once."""

    def __init__(self, directory: RunDirectory, config: Config) -> None:
        self._file = LineTail(directory.samples)
        self._config = config
        self._model = [directory.model, Path(config.model.name)]
        self._decode: Decode | None = None
        self._restarts = 0
        self._groups: dict[tuple[int, int], RecordedGroup] = {}

    def look(self) -> int:
        """Reads what is new; returns the number of groups."""
        for place, length, line in self._file.new():
            if self._file.restarts != self._restarts:
                self._groups.clear()
                self._restarts = self._file.restarts
            if line.keys() >= FIELDS:
                self._add(line, (place, length))
        return len(self._groups)

    def _add(self, line: Object, place: tuple[int, int]) -> None:
        step = line["step"]
        incarnation = line["incarnation"]
        skipped = line.get("skipped", "")
        while self._groups:
            newest = next(reversed(self._groups.values()))
            other = newest.incarnation < incarnation or newest.skipped != skipped
            if newest.step < step or (newest.step == step and not other):
                break
            self._groups.popitem()
        key = (step, line["group"])
        if key not in self._groups:
            prompt = str(line["prompt"])[:SHOWN_CHARACTERS]
            self._groups[key] = RecordedGroup(*key, incarnation, skipped, prompt, bool(line.get("turns")))
            if len(self._groups) > MAX_GROUPS:
                del self._groups[next(iter(self._groups))]
        group = self._groups[key]
        group.rewards.append(line["reward"])
        group.masked += line["masked"]
        group.places.append(place)

    def page(self, before: int | None) -> dict[str, Any]:
        """Returns groups, newest first. before: the number of the group after them, as `next` of the page before."""
        groups = list(self._groups.values())
        end = len(groups) if before is None else max(0, min(before, len(groups)))
        shown = [group.row() for group in islice(reversed(groups[:end]), PAGE)]
        return {"groups": shown, "next": end - len(shown), "all": len(groups), "damaged": self._file.damaged}

    def group(self, step: int, group: int) -> dict[str, Any] | None:
        """Returns the samples of one group with their tokens; None when it is not recorded."""
        found = self._groups.get((step, group))
        if found is None:
            return None
        lines = self._read(found.places)
        if self._decode is None:
            self._decode = token_decoder(self._model)
        return {"step": step, "group": group, "samples": [self._shown(SampleRecord(**line)) for line in lines]}

    def _read(self, places: Sequence[tuple[int, int]]) -> list[Object]:
        lines = []
        with self._file.path.open("rb") as file:
            for place, length in places:
                file.seek(place)
                lines.append(json.loads(file.read(length)))
        return lines

    def _shown(self, record: SampleRecord) -> dict[str, Any]:
        """Returns what the page shows of a sample: its turns, or its answer with a colour for each token."""
        tokens = shown_tokens(record, self._decode, self._config) if self._decode and record.token_ids else []
        kept = {name: value for name, value in asdict(record).items() if name not in (*TOKEN_FIELDS, *BY_TOKEN)}
        return {**kept, "behind": record.step - 1 - record.first, "tokens_shown": [asdict(each) for each in tokens]}
