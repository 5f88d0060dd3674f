"""asyncrl join and admit: keys of hosts that join, and what workers there are forked from."""

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
from asyncrl.fleet.launching.key_folder import KeyFolder, WorkerKey
from tests import golden

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


@pytest.mark.parametrize("text", ["{secret\n", '["secret"]\n', "", '{"secret": "s"}\n'])
def test_what_is_no_key_is_refused_and_not_repeated(
    text: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert served_with(text, monkeypatch) == 2
    golden.says(said := capsys.readouterr().err, "the line on standard input is no key")
    assert "secret\n" not in said
    assert '"s"' not in said


def test_a_key_of_another_role_is_refused_from_a_pipe_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = KeyFolder.made(tmp_path).key_of("generation").read_text()
    assert served_with(" ".join(key.split()) + "\n", monkeypatch) == 2
    golden.says(capsys.readouterr().err)


@pytest.mark.parametrize(
    "flags",
    [
        "--timeout -5",
        "--timeout nan",
        "--drain 1e9",
        f"--address {ELSEWHERE}",
        "--address 0.0.0.0",
        "--address tcp://127.0.0.1:5",
    ],
)
def test_flags_that_no_worker_could_use_are_refused_before_joining(
    flags: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = KeyFolder.made(tmp_path).key_of("reward")
    assert cli.main([*JOIN[:-1], str(key), *flags.split()]) == 2
    golden.says(capsys.readouterr().err)


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


def test_a_key_is_shown_with_the_command_that_uses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["admit", str(tmp_path), "generation", "--name", "rented"]) == 0
    assert WorkerKey.read(tmp_path / "rented.key").role == "generation"
    assert cli.main(["admit", str(tmp_path), "monitor"]) == 0
    golden.says(capsys.readouterr().out)


@pytest.mark.parametrize(
    "arguments",
    [
        "keys generator",
        "keys controller",
        "keys reward --name controller",
        "keys reward --name generation",
        "file generation",
        "file/below generation",
    ],
)
def test_a_key_that_would_not_do_what_it_says_is_refused(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    KeyFolder.made(tmp_path / "keys").key_of("generation")
    (tmp_path / "file").write_text("")
    before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
    assert cli.main(["admit", *arguments.split()]) == 2
    golden.says(capsys.readouterr().err)
    assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
