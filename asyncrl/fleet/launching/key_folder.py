"""Keys of workers that join: a pair for the controller, and one for each role, in a folder of the controller.

controller.key    the pair of the controller, which stays with it
NAME.key          the pair of workers of one role, and the public key of the controller: copied to their hosts
NAME.admitted     role, public key and proof of NAME.key; a key whose file is deleted joins no more
"""

import asyncio
import hmac
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path

from asyncrl.config.secret_places import note_places
from asyncrl.errors import ConfigError
from asyncrl.lanes.control.auth import CurveKeys

CONTROLLER = "controller.key"
MONITOR = "monitor"
"""Role of keys with which a run is watched, and no worker joins."""
ADMITTED = ".admitted"
LOOK_SECONDS = 0.25
"""Seconds until a key that was made or revoked counts: less than a host takes for its tries to join."""
PLAIN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")


@dataclass(frozen=True, slots=True)
class WorkerKey:
    """The content of NAME.key."""

    role: str
    keys: CurveKeys

    @property
    def proof(self) -> str:
        """Returns what only a holder of the secret knows, for a listener that has to tell the roles of keys apart."""
        return _proof(self.keys.secret)

    @classmethod
    def read(cls, path: Path) -> "WorkerKey":
        """Reads NAME.key. Raises ConfigError when there is no such file, or another one."""
        return cls._of(_read(path), str(path))

    @classmethod
    def parse(cls, text: str, source: str) -> "WorkerKey":
        """Reads the content of NAME.key. source: names it in errors. Raises ConfigError for something else."""
        return cls._of(_parsed(text, source), source)

    @classmethod
    def _of(cls, fields: Mapping[str, str], source: str) -> "WorkerKey":
        try:
            return cls(fields["role"], CurveKeys(fields["public"], fields["secret"], server=fields["controller"]))
        except KeyError as missing:
            advice = "name the key that `asyncrl admit` wrote, or the run under its join_keys"
            raise ConfigError(f"{source} is no key of a worker, it has no {missing}: {advice}") from missing


@dataclass(frozen=True, slots=True)
class Admitted:
    """The content of NAME.admitted."""

    role: str
    public: str
    proof: str


def _statuses(paths: Iterable[Path]) -> Iterator[tuple[Path, os.stat_result]]:
    for path in paths:
        with suppress(FileNotFoundError):  # It was revoked just now.
            yield path, path.stat()


def _admitted(path: Path) -> Admitted | None:
    try:
        return Admitted(**json.loads(path.read_text()))
    except (FileNotFoundError, ValueError, TypeError):
        return None


@dataclass(slots=True)
class KeyFolder:
    """The keys of one controller. path: a folder that exists. admitted: as they were when it was last looked at, by
    name."""

    path: Path
    admitted: tuple[Admitted, ...] = field(default=(), init=False, repr=False, compare=False)
    _public: frozenset[str] = field(default=frozenset(), init=False, repr=False, compare=False)
    _seen: tuple[tuple[str, int, int], ...] = field(default=(), init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._look()

    @classmethod
    def made(cls, path: Path) -> "KeyFolder":
        """Returns the folder; makes it, and the pair of the controller, where they are missing. Raises ConfigError
        where none can be made."""
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not (path / CONTROLLER).exists():
                fresh = CurveKeys.fresh()
                _write(path / CONTROLLER, {"public": fresh.public, "secret": fresh.secret})
        except OSError as error:
            raise ConfigError(f"{path} can be no folder of keys: {error.strerror}; name another one") from error
        return cls(path)

    def controller_keys(self) -> CurveKeys:
        """Returns the pair of the controller, which accepts itself and, at each handshake and message, the keys that
        are admitted then (`follow`). Raises ConfigError when there is no pair, or no key was admitted."""
        fields = _read(self.path / CONTROLLER)
        if not self.admitted:
            raise ConfigError(f"{self.path} admits no key: `asyncrl admit {self.path} ROLE` makes one")
        return CurveKeys(fields["public"], fields["secret"], admitted_now=lambda: self._public)

    def key_of(self, role: str, name: str = "") -> Path:
        """Returns the key of workers of a role; makes it and admits it where it is missing. name: role by default."""
        name = name or role
        if not PLAIN_NAME.fullmatch(name):
            raise ConfigError(f"{name!r} is no name of a key: write letters, digits, - and _")
        path = self.path / f"{name}.key"
        admission = self.path / f"{name}{ADMITTED}"
        if path.name == CONTROLLER:
            raise ConfigError(f"{path} is the key of the controller: write another --name")
        if path.exists():
            if not admission.exists():
                raise ConfigError(f"{path} was revoked: delete it to make another one of that name")
            if (found := WorkerKey.read(path).role) != role:
                raise ConfigError(f"{path} is a key of {found} workers already: write another --name")
            return path
        fresh = CurveKeys.fresh()
        controller = _read(self.path / CONTROLLER)["public"]
        _write(path, {"role": role, "public": fresh.public, "secret": fresh.secret, "controller": controller})
        _write(admission, asdict(Admitted(role, fresh.public, _proof(fresh.secret))))
        self.look()
        return path

    def look(self) -> None:
        """Takes over which keys are admitted now; nothing changes while the folder cannot be read."""
        with suppress(OSError):
            self._look()

    def _look(self) -> None:
        """Reads the files again where one came, changed or went. One that is being written counts once it is whole."""
        paths = sorted(self.path.glob(f"*{ADMITTED}"))
        seen = tuple((path.name, status.st_mtime_ns, status.st_size) for path, status in _statuses(paths))
        if seen != self._seen:
            self.admitted = tuple(each for path in paths if (each := _admitted(path)) is not None)
            self._public = frozenset(each.public for each in self.admitted)
            self._seen = seen

    async def follow(self) -> None:
        """Takes that over again and again, until cancelled; a disk that is slow holds up no loop."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await asyncio.to_thread(self.look)

    def role_of(self, proof: str) -> str:
        """Returns the role whose workers have this proof; "" for a key that was revoked."""
        return next((each.role for each in self.admitted if hmac.compare_digest(each.proof, proof)), "")


def _proof(secret: str) -> str:
    return sha256(f"asyncrl joins {secret}".encode()).hexdigest()


def _read(path: Path) -> dict[str, str]:
    note_places([path])
    try:
        return _parsed(path.read_text(), str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error


def _parsed(text: str, source: str) -> dict[str, str]:
    """Parses a key; an error quotes nothing of it."""
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{source} is no key: {error}") from error
    if not isinstance(fields, dict):
        raise ConfigError(f"{source} is no key: it is no JSON object")
    return fields


def _write(path: Path, fields: Mapping[str, str]) -> None:
    """Writes a file that only this user reads, and none that exists."""
    note_places([path])
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(fields, file, indent=1)
        file.write("\n")
