"""The address at which metrics are scraped, and the token that scrapes send; read without the packages of the extra."""

from collections.abc import Iterator
from pathlib import Path

from asyncrl.config.problems import Problem
from asyncrl.config.sections.telemetry_config import TelemetryConfig
from asyncrl.errors import ConfigError
from asyncrl.lanes.bound_socket import bound_socket

SHORTEST_TOKEN = 16
"""Characters of a token, below which it could be guessed."""


def scrape_problems(section: TelemetryConfig) -> Iterator[Problem]:
    """Yields a problem when the address is taken, or not of this machine, or there is no token in its file."""
    if section.prometheus:
        try:
            bound_socket(*host_and_port(section.prometheus), "telemetry.prometheus").close()
            if section.prometheus_token:
                read_token(section.prometheus_token)
        except ConfigError as error:
            yield Problem.of_error(error, "telemetry.prometheus")


def host_and_port(address: str) -> tuple[str, int]:
    """Splits HOST:PORT; a number of IPv6 is in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def read_token(file: str) -> str:
    """Returns the token in a file. Raises ConfigError for a file that cannot be read, and for a token that is short."""
    try:
        token = Path(file).expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"telemetry.prometheus_token: {file} cannot be read: {error}") from error
    if len(token) < SHORTEST_TOKEN or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError(
            f"telemetry.prometheus_token: {file} holds no token: write at least {SHORTEST_TOKEN} letters and digits "
            "into it, such as from `openssl rand -hex 16`"
        )
    return token
