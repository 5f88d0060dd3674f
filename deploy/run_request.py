"""A run as its caller wants it: config, directory, and Python objects in place of what the config names."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config.schema import Config
from asyncrl.controller.controller import Algorithm
from asyncrl.controller.training_run import OnStep
from asyncrl.deploy.process.fork_client import Forks
from asyncrl.fleet.fleet import ServiceSpec
from asyncrl.tasks.row_files import Rows
from asyncrl.telemetry.display import Display


@dataclass(frozen=True, slots=True)
class RunRequest:
    """A run that the user requests.

    command: resumes the run. places: where the values of keys come from. prompts, algorithm, services: Python objects
    that replace those of the config, such as rewards in this process. on_step: takes the metrics of each step, and
    returns whether the run shall end. forks: what workers are forked from, if it was started already. store: address
    that gets a copy of the run after each checkpoint, "" for none. is_call: a program calls, which gets an error of its
    own code as it is; else it is an end of the run like any other.
    """

    config: Config
    run_dir: Path
    display: Display
    command: str
    accept_changes: bool = False
    places: Mapping[str, str] = field(default_factory=dict)
    prompts: Rows | None = None
    algorithm: Algorithm | None = None
    services: Mapping[str, ServiceSpec] = field(default_factory=dict)
    forks: Forks | None = None
    store: str = ""
    on_step: OnStep | None = None
    is_call: bool = False
