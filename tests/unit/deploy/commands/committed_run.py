"""Run directories with a checkpoint, as a run leaves them."""

from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.config.toml_writer import dump
from asyncrl.controller.journal.checkpoints import commit
from asyncrl.controller.journal.journal import Journal
from asyncrl.controller.journal.run_storage import FileStore
from asyncrl.protocols.messages import Checkpointed


async def committed_run(path: Path, config: Config, write: Callable[[Path], object]) -> Path:
    """Makes the directory of a run with a checkpoint of version 0, whose files `write` makes."""
    with closing(_begun(path, config)) as store:
        journal = Journal(store)

        async def checkpoint(directory: str) -> Checkpointed:
            write(folder := Path(directory))
            return Checkpointed(0, journal.ledger.chain.hex(), _digests(folder))

        await commit(journal, checkpoint, keep=1)
    return path


def _begun(path: Path, config: Config) -> FileStore:
    path.mkdir()
    (path / "config.toml").write_text(dump(config))
    return FileStore(path)


def _digests(folder: Path) -> dict[str, str]:
    files = [each for each in folder.rglob("*") if each.is_file()]
    return {str(each.relative_to(folder)): sha256(each.read_bytes()).hexdigest() for each in files}
