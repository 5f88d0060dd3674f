"""asyncrl join: the key that it reads from a pipe, and what its workers are forked from."""

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asyncrl.deploy import cli
from asyncrl.deploy.commands import join
from asyncrl.deploy.process import fork_client
from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.key_folder import KeyFolder

ELSEWHERE = "192.0.2.7"
"""An address of a network for documentation, RFC 5737."""
JOIN = ["join", "reward", "--to", "tcp://127.0.0.1:7000", "--key", "-"]


def served_with(text: str, monkeypatch: pytest.MonkeyPatch) -> int:
    reads, writes = os.pipe()
    os.write(writes, text.encode())
    os.close(writes)
    with os.fdopen(reads) as pipe:
        monkeypatch.setattr(sys, "stdin", pipe)
        return cli.main(JOIN)


def test_a_key_of_another_role_is_refused_from_a_pipe_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = KeyFolder.made(tmp_path).key_of("generation").read_text()
    assert served_with(" ".join(key.split()) + "\n", monkeypatch) == 2
    assert "- is a key of generation workers, not of reward workers" in capsys.readouterr().err


def test_what_is_no_key_is_refused_and_not_repeated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("{secret\n", '["secret"]\n', "", '{"secret": "s"}\n'):
        assert served_with(text, monkeypatch) == 2
        said = capsys.readouterr().err
        assert "the line on standard input is no key" in said
        assert "secret\n" not in said
        assert '"s"' not in said


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--timeout", "-5"), "--timeout: -5 s is no time to wait; write 0 or more"),
        (("--timeout", "nan"), "--timeout: nan s is no time to wait"),
        (("--address", ELSEWHERE), f"--address: {ELSEWHERE} is no address of this host"),
        (("--address", "0.0.0.0"), "--address: 0.0.0.0 is every address of a host"),
        (("--address", "tcp://127.0.0.1:5"), "is no address; write"),
    ],
)
def test_flags_that_no_worker_could_use_are_refused_before_joining(
    flags: tuple[str, str], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = KeyFolder.made(tmp_path).key_of("reward")
    assert cli.main([*JOIN[:-1], str(key), *flags]) == 2
    assert why in capsys.readouterr().err


def test_a_file_as_standard_input_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with KeyFolder.made(tmp_path).key_of("reward").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert cli.main(JOIN) == 2
    assert "--key -: standard input is a file, not a pipe: name the file with --key FILE" in capsys.readouterr().err


def test_workers_of_every_role_are_forked_and_torch_is_imported_only_for_those_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    imported = []

    @contextmanager
    def forks(environment: dict[str, str], modules: tuple[str, ...]) -> Iterator[str]:
        imported.append(modules)
        yield "forks"

    monkeypatch.setattr(fork_client, "Forks", forks)
    for role in ("reward", "generation"):
        with join._forks(role) as forked:
            assert str(forked) == "forks"
    assert imported == [(), fork_client.MODULES]


@pytest.mark.parametrize(("soft", "hard", "raised"), [(1024, 1 << 20, 24064), (256, 4096, 4096), (1 << 20, 1 << 20, 0)])
def test_a_host_may_open_as_many_files_as_a_large_fleet_needs(
    soft: int, hard: int, raised: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = KeyFolder.made(tmp_path).key_of("reward")
    limits = list[tuple[int, int]]()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda what, limit: limits.append(limit))
    with pytest.raises(ConfigError, match="no address of this host"):
        join.main(["reward", "--to", "tcp://127.0.0.1:7000", "--key", str(key), "--address", "203.0.113.9"])
    assert limits == ([(raised, hard)] if raised else [])
