"""Notes of the places at which runs, keys and tokens of this user's asyncrl lie, made when one is made or read, so that
contained code of any run sees the secrets of none.

DEFAULT_CACHE/secret_places/DIGEST     the path of a run directory, or of a file with a key or token
"""

import hashlib
import os
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

KEPT = ("commands.json", "feedback.json", "secrets.json", "join_keys")
"""Files and folders of a run with keys."""
RUN_MARK = "config.toml"
"""File that each run directory has."""


def default_cache() -> Path:
    """Returns where this user's programs keep what they can get again."""
    with suppress(RuntimeError):  # A user without a home folder.
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "asyncrl"
    return Path(tempfile.gettempdir(), f"asyncrl-{os.getuid()}")


def note_places(paths: Iterable[str | Path]) -> None:
    """Notes run directories and files with secrets, of other folders their keys, as far as this user may write notes.
    Those among temporary files need none: contained code has folders of its own in their place."""
    folder = default_cache() / "secret_places"
    for path in (Path(os.path.abspath(os.path.expanduser(each))) for each in paths):
        if not path.is_relative_to(tempfile.gettempdir()):
            for each in path.glob("*.key") if path.is_dir() and not (path / RUN_MARK).exists() else (path,):
                name = os.fsencode(each)
                with suppress(OSError):
                    folder.mkdir(0o700, parents=True, exist_ok=True)
                    (folder / hashlib.sha256(name).hexdigest()[:32]).write_bytes(name)


def _noted() -> Iterator[Path]:
    """Yields the noted paths at which something is, and deletes the notes of others."""
    for note in (default_cache() / "secret_places").glob("*"):
        with suppress(OSError):
            path = Path(os.fsdecode(note.read_bytes()))
            if path.exists():
                yield path
            elif path.parent.exists():  # Else its disk may be away for a while.
                note.unlink()


def secrets_of_runs(run_dirs: Iterable[Path]) -> tuple[set[str], set[str]]:
    """Returns the paths of secrets of all runs of this user that are known, and the folders in which runs lie, where
    more may begin. run_dirs: further runs that are known."""
    noted = set(_noted())
    runs = {*run_dirs, *(path for path in noted if (path / RUN_MARK).exists())}
    folders = {path.parent for path in runs}
    beside = (each for folder in folders for name in KEPT for each in (*folder.glob(f"*/{name}"),))
    of_runs = (path / name for path in runs for name in KEPT)
    return {str(path) for path in (*(noted - runs), *of_runs, *beside)}, {str(path) for path in folders}
