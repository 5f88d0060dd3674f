import stat
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.fleet.launching.key_folder import KeyFolder, WorkerKey


def test_a_key_is_of_one_role_and_only_its_user_reads_it(tmp_path: Path) -> None:
    folder = KeyFolder.made(tmp_path / "keys")
    path = folder.key_of("generation")
    key = WorkerKey.read(path)
    assert key.role == folder.role_of(key.proof) == "generation"
    assert folder.key_of("generation") == path, "a key that exists is kept"
    assert {stat.S_IMODE(each.stat().st_mode) for each in folder.path.iterdir()} == {0o600}
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700


def test_callers_and_listener_know_each_other(tmp_path: Path) -> None:
    folder = KeyFolder.made(tmp_path)
    callers = [WorkerKey.read(folder.key_of(role)).keys for role in ("generation", "reward")]
    listener = KeyFolder.made(tmp_path).controller_keys()
    assert listener.admitted_now is not None
    assert {*listener.admitted_now()} == {each.public for each in callers}
    assert {each.server for each in callers} == {listener.public}
    assert listener.secret not in repr(listener)


def test_a_key_whose_admission_is_deleted_joins_no_more(tmp_path: Path) -> None:
    folder = KeyFolder.made(tmp_path)
    key = WorkerKey.read(folder.key_of("generation", "rented"))
    folder.key_of("generation")
    (tmp_path / "rented.admitted").unlink()
    folder.look()
    assert folder.role_of(key.proof) == ""
    listener = folder.controller_keys()
    assert listener.admitted_now is not None
    assert key.keys.public not in listener.admitted_now()
    with pytest.raises(ConfigError, match="was revoked"):
        folder.key_of("generation", "rented")


def test_an_admission_counts_from_when_it_is_whole(tmp_path: Path) -> None:
    folder = KeyFolder.made(tmp_path)
    folder.key_of("reward")
    listener = folder.controller_keys()
    late = WorkerKey.read(KeyFolder(tmp_path).key_of("generation", "late"))
    admission = tmp_path / "late.admitted"
    whole = admission.read_text()
    admission.write_text(whole[:20])
    folder.look()
    assert listener.admitted_now is not None
    assert late.keys.public not in listener.admitted_now()
    admission.write_text(whole)
    folder.look()
    assert late.keys.public in listener.admitted_now()
    assert folder.role_of(late.proof) == "generation"


def test_files_that_are_no_keys_are_refused(tmp_path: Path) -> None:
    folder = KeyFolder.made(tmp_path)
    with pytest.raises(ConfigError, match="admits no key"):
        folder.controller_keys()
    with pytest.raises(ConfigError, match=r"controller\.key is no key of a worker"):
        WorkerKey.read(tmp_path / "controller.key")
    with pytest.raises(ConfigError, match="cannot be read"):
        WorkerKey.read(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="no name of a key"):
        folder.key_of("generation", "../x")
