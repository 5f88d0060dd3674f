"""Messages between hosts that join and the controller: offers, orders, and files that a host does not see."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ListedFile:
    """A file of the controller. name: relative to its folder, with "/". sha256: of its content, in hex."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class FileTree:
    """Files of one folder of the controller. path: of the folder there. use: "folder" (workers read the folder),
    "files" (they read files by their paths), "module" (they import them by a name, so they have to be there), "run"
    (the run directory, where they write logs; the files tell whether it is the same) or "shared" (the run directory,
    where they write checkpoints, so it has to be there)."""

    path: str
    use: str
    files: tuple[ListedFile, ...]


@dataclass(frozen=True, slots=True)
class FilePart:
    """Bytes of a file from the offset that a host asked for."""

    data: bytes
    crc32: int


@dataclass(frozen=True, slots=True)
class JoinRequest:
    """Host -> controller: an offer to run one worker of a service. agent: names the offer, and is used once. machine,
    memory, host: the identity of the host. versions: of installed packages. proof: of the key's secret. gpus: names of
    those that the host has. runs: the instance that outlived an earlier connection, "" for none."""

    service: str
    agent: str
    machine: str
    memory: str
    host: str
    versions: dict[str, str]
    proof: str
    gpus: list[str] = field(default_factory=list)
    runs: str = ""


@dataclass(frozen=True, slots=True)
class JoinOrder:
    """Controller -> host: what to do. kind: "fetch" (look for the files that the worker reads), "keep" (go on with the
    worker that runs), "start" (text: its specification), "stop", "terminate", "kill" (text: why, if it is known),
    "wait" (a sign of life) or "leave" (the run has ended, or wants this host no more: text says why)."""

    kind: str
    instance: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class ProbeAnswer:
    """Controller -> host that asks whether it could join. objection: why not, "" if it may. versions: of the
    controller's packages; packages: those that have to agree. ticket: for the parts that measure the connection."""

    objection: str
    versions: dict[str, str]
    packages: list[str]
    ticket: str
