"""Rules of the section `[telemetry]`."""

import sys

import pytest

from asyncrl.config.install_hints import missing_packages
from asyncrl.config.schema import Config
from asyncrl.config.sources import load
from asyncrl.errors import ConfigError
from tests import golden


def loaded(**keys: str) -> Config:
    return load("quickstart", [f"--telemetry.{key}={value}" for key, value in keys.items()], {}).config


@pytest.mark.parametrize("address", ["127.0.0.1:9400", "localhost:0", "[::1]:9400"])
def test_metrics_are_served_on_the_loopback_interface_without_a_warning(address: str) -> None:
    assert loaded(prometheus=address).warnings == []


@pytest.mark.parametrize("address", ["9400", "127.0.0.1", "127.0.0.1:", "127.0.0.1:70000", "::1:9400", "http://a:1"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with golden.raises(ConfigError, match=r"telemetry\.prometheus.*HOST:PORT"):
        loaded(prometheus=address)


@pytest.mark.parametrize("address", ["0.0.0.0:9400", "10.0.0.1:9400", "[::]:9400", "host1:9400"])
def test_an_address_that_others_reach_needs_a_token_and_warns_of_listeners(address: str) -> None:
    with golden.raises(ConfigError, match=r"telemetry\.prometheus"):
        loaded(prometheus=address)
    (warning,) = loaded(prometheus=address, prometheus_token="/token").warnings
    golden.says(str(warning))


def test_a_token_without_an_address_is_a_warning() -> None:
    (warning,) = loaded(prometheus_token="/token").warnings
    assert "write telemetry.prometheus" in str(warning)


def test_packages_that_are_missing_are_named_with_their_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    (problem,) = missing_packages(loaded(prometheus="127.0.0.1:9400"))
    golden.says(str(problem), "prometheus_client")
    assert "[prometheus]" in str(problem)


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"otlp": "127.0.0.1:4318"}, r"telemetry\.otlp.*'127\.0\.0\.1:4318'"),
        ({"otlp": "http://127.0.0.1:4318", "trace": "false"}, r"telemetry\.otlp.*write telemetry\.trace = true"),
    ],
)
def test_spans_need_a_url_and_a_trace(keys: dict[str, str], says: str) -> None:
    assert loaded(otlp="http://127.0.0.1:4318").warnings == []
    with golden.raises(ConfigError, match=says):
        loaded(**keys)
