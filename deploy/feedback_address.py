"""Chooses host, port and key of the page of live feedback, once for a run: its address survives restarts."""

import json
import os
import secrets
from contextlib import closing
from dataclasses import asdict, dataclass

from asyncrl.config.sections.feedback_config import FeedbackConfig
from asyncrl.config.sections.secret import Secret, revealed
from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket
from asyncrl.telemetry.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class FeedbackAddress:
    """The address of the page. key: lets whoever has it read and rate answers."""

    host: str
    port: int
    key: Secret

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/?key={self.key.value}"

    @property
    def options(self) -> dict[str, object]:
        """Returns the options of the service that serves the page."""
        return asdict(self)


def feedback_address(config: FeedbackConfig, directory: RunDirectory) -> FeedbackAddress:
    """Returns the address of this start; writes it to feedback.json, which only this user can read. Values that the
    config leaves open are those of the start before, if the port is still free. Raises ConfigError when the port that
    the config names is taken."""
    before = _before(directory)
    key = config.key.value or before.get("key") or secrets.token_urlsafe(16)
    address = FeedbackAddress(config.host, _free_port(config, before.get("port", 0)), Secret(str(key)))
    fresh = directory.feedback.with_suffix(".new")
    with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(json.dumps(revealed(asdict(address)) | {"url": address.url}) + "\n")
    fresh.replace(directory.feedback)
    return address


def _before(directory: RunDirectory) -> dict[str, object]:
    try:
        said = json.loads(directory.feedback.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return said if isinstance(said, dict) else {}


def _free_port(config: FeedbackConfig, before: object) -> int:
    if config.port == 0 and isinstance(before, int) and before:
        try:
            return _bindable(config.host, before)
        except ConfigError:
            pass
    return _bindable(config.host, config.port)


def _bindable(host: str, port: int) -> int:
    with closing(bound_socket(host, port, "feedback.port")) as bound:
        return int(bound.getsockname()[1])
