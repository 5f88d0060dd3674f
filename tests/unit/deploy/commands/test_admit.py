"""asyncrl admit: for whom it makes keys, and how each is used."""

import re
from pathlib import Path

import pytest

from asyncrl.deploy.cli import main
from asyncrl.fleet.launching.key_folder import KeyFolder, WorkerKey


def test_a_key_is_shown_with_the_command_that_uses_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["admit", str(tmp_path), "generation", "--name", "rented"]) == 0
    assert WorkerKey.read(tmp_path / "rented.key").role == "generation"
    assert "join generation --to tcp://HOST:PORT --key rented.key\n" in capsys.readouterr().out
    assert main(["admit", str(tmp_path), "monitor"]) == 0
    printed = capsys.readouterr().out
    assert "monitor tcp://HOST:PORT --key monitor.key\n" in printed
    assert "join" not in printed.partition("\n")[0]


@pytest.mark.parametrize(
    ("role", "flags", "why"),
    [
        ("generator", (), "there is no role 'generator'; there are generation, .* did you mean generation\\?"),
        ("controller", (), "there is no role 'controller'"),
        ("reward", ("--name", "controller"), "controller.key is the key of the controller: write another --name"),
        ("reward", ("--name", "generation"), "generation.key is a key of generation workers already"),
    ],
)
def test_a_key_that_would_not_do_what_it_says_is_refused(
    role: str, flags: tuple[str, ...], why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    KeyFolder.made(tmp_path).key_of("generation")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert main(["admit", str(tmp_path), role, *flags]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(why, captured.err)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for name in ("file", "file/below"):
        assert main(["admit", str(tmp_path / name), "generation"]) == 2
        assert f"{tmp_path / name} can be no folder of keys: " in capsys.readouterr().err
