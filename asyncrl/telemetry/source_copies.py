"""Copies of the files that a run reads, prompts and code with what it imports beside it, in `sources/`.

`index.json` there has the SHA-256 of each, also of those that are too large to be copied; a resume and the audit
compare them.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

from asyncrl.errors import ConfigError
from asyncrl.telemetry.run_directory import replace_text

LARGEST_COPY = 2**20
"""Bytes of the largest file that is copied: code and small sets of prompts. Of a larger file the digest is kept."""
INDEX = "index.json"


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file. key: config key that names it. digest: SHA-256 in hex, "" when it is gone. copy: name of the copy in
    `sources/`, "" when the file is too large."""

    key: str
    path: str
    bytes: int
    digest: str
    copy: str = ""


@dataclass(frozen=True, slots=True)
class SourceChange:
    """One file that is not what it was. text: what changed."""

    key: str
    text: str

    def __str__(self) -> str:
        return f"{self.key}: {self.text}"


def look_at(files: Iterable[tuple[str, Path]]) -> list[SourceFile]:
    """Reads the files and returns what they are now. files: config key and path."""
    return [_looked_at(key, path) for key, path in files]


def _looked_at(key: str, path: Path) -> SourceFile:
    try:
        with path.open("rb") as file:
            digest = sha256()
            size = 0
            while block := file.read(2**20):
                digest.update(block)
                size += len(block)
    except OSError:
        return SourceFile(key, str(path), 0, "")
    copy = f"{digest.hexdigest()[:8]}-{path.name}" if size <= LARGEST_COPY else ""
    return SourceFile(key, str(path), size, digest.hexdigest(), copy)


def keep(folder: Path, files: Iterable[SourceFile]) -> None:
    """Copies the files to `folder` and writes its index; copies of earlier starts stay."""
    files = list(files)
    folder.mkdir(exist_ok=True)
    for file in files:
        if file.copy and not (folder / file.copy).exists():
            shutil.copyfile(file.path, folder / file.copy)
    replace_text(folder / INDEX, json.dumps([asdict(file) for file in files], indent=1) + "\n")


def kept(folder: Path) -> list[SourceFile]:
    """Returns what the last start of the run read; empty where its index is gone. Raises ConfigError for an index
    that cannot be read."""
    index = folder / INDEX
    if not index.is_file():
        return []
    try:
        return [SourceFile(**fields) for fields in json.loads(index.read_text())]
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{index} is damaged ({error}): put an undamaged copy in its place, or remove it to go on without knowing "
            "whether prompts and code have changed"
        ) from None


def changed(old: Iterable[SourceFile], new: Iterable[SourceFile], folder: Path) -> list[SourceChange]:
    """Returns what differs between the files that the last start read and those that this one reads. Files that only
    lie elsewhere now do not differ; nothing does from a run whose files are not known."""
    old = list(old)
    new = list(new)
    before, now = ({(file.key, file.path): file for file in files} for files in (old, new))
    same = moved(old, new)
    found = []
    for (key, path), file in now.items():
        was = before.get((key, path))
        if was is None and before and key not in same:
            found.append(SourceChange(key, f"{path} is read now, and was not kept at the last start"))
        elif was is not None and was.digest != file.digest:
            differs = f"has changed (SHA-256 {was.digest[:8]} -> {file.digest[:8]})" if file.digest else "is gone"
            found.append(SourceChange(key, f"{path} {differs}{_copy_of(was, folder)}"))
    gone = [file for name, file in before.items() if name not in now and file.key not in same]
    return found + [SourceChange(file.key, f"{file.path} is read no more{_copy_of(file, folder)}") for file in gone]


def _copy_of(file: SourceFile, folder: Path) -> str:
    return f"; {folder / file.copy} is what it was" if file.copy else ""


def moved(old: Iterable[SourceFile], new: Iterable[SourceFile]) -> set[str]:
    """Returns the config keys whose files hold what they held before, wherever they are now."""
    then = defaultdict[str, list[str]](list)
    now = defaultdict[str, list[str]](list)
    for digests, files in ((then, old), (now, new)):
        for file in files:
            digests[file.key].append(file.digest)
    return {key for key, digests in now.items() if "" not in digests and then.get(key) == digests}


def damaged_copies(folder: Path) -> list[str]:
    """Returns the copies that are missing or do not have their digest; raises what `kept` raises. Each start of a run
    writes an index, so that one without has lost it."""
    if not (folder / INDEX).is_file():
        return [f"{folder / INDEX} is gone, so that nothing tells which prompts and code the run read"]
    found = []
    for file in kept(folder):
        if file.copy and _looked_at(file.key, folder / file.copy).digest != file.digest:
            found.append(f"{folder / file.copy} is not the {file.path} that the run read for {file.key}")
    return found
