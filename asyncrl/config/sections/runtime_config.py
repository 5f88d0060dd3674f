"""The sections of how a run is operated, none of which says what is learnt: `[fleet]`, `[children]`, `[feedback]` and
`[telemetry]`."""

import re
from ipaddress import ip_address
from typing import Annotated, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from asyncrl.config.sections.algorithm_config import NonEmpty, Positive, PositiveFloat, Section
from asyncrl.config.sections.named_values import Named
from asyncrl.config.sections.secret import WITHHELD, Secret, SecretPath


class FleetConfig(Section):
    """Processes, their connections and deadlines."""

    wire: Literal["ipc", "tcp", "inproc"] = "ipc"
    """Connection of the workers: with rows in shared memory (ipc), as frames over loopback or where `listen` is (tcp),
    or everything in one process, for tests (inproc)."""
    listen: str = ""
    """Address tcp://HOST:PORT at which workers of other hosts join. Empty: all workers start here."""
    joined: dict[str, Positive] = Field(default={})
    """Services whose workers join, with the number that the run waits for: {generation = 2}. More may join up to the
    replicas of the service."""
    join_deadline: PositiveFloat = 300.0
    """Seconds without progress that the run waits for workers of fleet.joined, also when a service has lost all of its
    own."""
    join_keys: SecretPath = ""
    """Folder with the keys that may join (`asyncrl admit`). Empty, on loopback: `join_keys` in the run directory."""
    ray_resources: dict[str, dict[str, PositiveFloat]] = Field(default={})
    """Resources of a worker on Ray: {generation = {CPU = 4, GPU = 1, rented = 1}}. Default: one CPU, and one GPU where
    the service's device is cuda."""
    call_deadline: PositiveFloat = 600.0
    """Seconds without answer or progress after which a worker's calls are given up and it is started again."""
    grace: PositiveFloat = 20.0
    """Seconds from the signal that ends a run until its last checkpoint is begun; a step that takes over a third of
    them is undone. Writing it, and ten seconds to stop workers, come on top."""
    start_deadline: PositiveFloat = 120.0
    """Seconds in which a worker starts and loads its model."""
    watchdog: PositiveFloat = 120.0
    """Seconds without progress after which the state of the fleet is printed. A worker that does not answer for as long
    (at least 5 s) is killed and replaced; trainer and critics as `trainer_restarts` says."""
    restarts: Annotated[int, Field(ge=0)] = 0
    """Restarts of the command by itself after trainer or controller died."""
    trainer_restarts: Annotated[int, Field(ge=0)] = 3
    """Returns of trainer and critics to one checkpoint after one of them died; the next death ends the run with exit
    status 75. Always 0 where the trainer or a critic joins, or generation is in the processes of the trainer."""
    threads: Positive = 1
    """Number of torch threads of each worker."""
    start: Literal["fork", "spawn"] = "fork"
    """Start of worker processes: copies of one that has imported torch (fork), or new ones (spawn), as for all that
    cannot be forked."""


# The section `[children]` of a config.


def _variable(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or name.startswith("ASYNCRL_"):
        raise ValueError("must be the name of an environment variable, and none that begins with ASYNCRL_")
    return name


VariableName = Annotated[str, AfterValidator(_variable)]


class ChildrenConfig(Section):
    """The processes that run your reward functions and environments."""

    sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Isolation of these processes. bubblewrap: they read the machine, but reach neither run directory, keys and
    tokens, nor the fleet or other processes. none: they can do all that you can."""
    network: bool = True
    """Lets these processes use the network."""
    variables: tuple[VariableName, ...] = ()
    """Environment variables that these processes get, such as the key of an API, beside harmless ones."""
    writable: Annotated[tuple[str, ...], Named.FOLDERS] = ()
    """Folders that these processes may write, beside a /tmp, /var/tmp, /run and /dev/shm of their own, which are empty
    at first."""


# The section `[feedback]` of a config.


def _checked_key(key: Secret) -> Secret:
    if key.value not in ("", WITHHELD) and not re.fullmatch(r"[A-Za-z0-9_-]{8,128}", key.value):
        raise PydanticCustomError(
            "feedback_key", "must be 8 to 128 characters, each a letter from A to Z, a digit, - or _"
        )
    return key


def _checked_host(host: str) -> str:
    try:
        return host if host == "localhost" else str(ip_address(host))
    except ValueError:
        text = "must be localhost or an IP address of this machine, such as 127.0.0.1"
        raise PydanticCustomError("feedback_host", text) from None


class FeedbackConfig(Section):
    """Live feedback: a person rates answers on a web page while the run trains."""

    ask: Literal["off", "rate", "pick"] = "off"
    """Question to a person: how good an answer is (rate), or which of two is better (pick). The reward term `person` is
    from 0 to 1."""
    scale: Annotated[int, Field(ge=2, le=10)] = 5
    """Largest rating, which counts 1, as a rating of 1 counts 0; with 2 the page shows thumbs."""
    weight: PositiveFloat = 1.0
    """Factor of the person's value in the reward."""
    deadline: PositiveFloat = 300.0
    """Seconds that a sample waits for a person."""
    otherwise: Literal["ignore", "constant", "model"] = "ignore"
    """Value of an unrated sample: none (ignore), `feedback.constant`, or the sigmoid of reward.model's score."""
    constant: Annotated[float, Field(ge=0, le=1)] = 0.5
    """Value of an unrated sample with `otherwise = "constant"`."""
    host: Annotated[str, AfterValidator(_checked_host)] = "127.0.0.1"
    """IP address of the page, or localhost; it is not encrypted, so use loopback."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the page; 0 chooses a free one."""
    key: Annotated[Secret, AfterValidator(_checked_key)] = Secret("")
    """Key in the address of the page: 8 to 128 letters, digits, - and _; default: random."""

    @property
    def asks(self) -> bool:
        """Says whether a person is asked at all."""
        return self.ask != "off"


# The section `[telemetry]`.


class TelemetryConfig(Section):
    """Output of the run besides its checkpoints."""

    samples_per_step: Annotated[int, Field(ge=0)] | Literal["all"] = 8
    """Samples of each step in samples.jsonl, in whole groups: at least one, unless it is 0."""
    samples_gb: PositiveFloat = 1.0
    """Most gigabytes of samples.jsonl; beyond, every second of its steps is left out."""
    print_every: Annotated[int, Field(ge=0)] = 1
    """Steps between two lines of output to a file; 0 prints warnings and errors only, on a terminal too."""
    sinks: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Services that get the metrics besides metrics.jsonl."""
    wandb_project: str = ""
    """Project of the run at wandb; default: WANDB_PROJECT, else asyncrl."""
    wandb_tags: tuple[NonEmpty, ...] = ()
    """Tags of the run at wandb."""
    on_step: Annotated[str, Named.CODE] = ""
    """Function FILE.py:NAME or module:NAME that gets the metrics of each step, a dict, and returns whether the run
    shall end."""
    trace: bool = True
    """Writes trace.json.gz, which opens in Perfetto."""
    report: bool = True
    """Writes report.html when the run ends."""
    record_gb: Annotated[float, Field(ge=0)] = 0.0
    """Gigabytes of each worker's newest calls that are kept for `asyncrl replay`; 0: none."""
    otlp: str = ""
    """URL of an OpenTelemetry collector (OTLP over HTTP), such as http://127.0.0.1:4318."""
    prometheus: str = ""
    """Address HOST:PORT of metrics for Prometheus, such as 127.0.0.1:9400. Empty: none."""
    prometheus_token: SecretPath = ""
    """File with a bearer token for scrapes, which an address that other hosts reach needs."""
