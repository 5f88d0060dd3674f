import re
from pathlib import Path
from typing import Any

from asyncrl.deploy.commands.doctor import fork_check


def test_shared_memory_is_measured_with_a_worker() -> None:
    found = fork_check(modules=())
    assert found.status == "ok"
    told = re.fullmatch(r"start in (\S+) s, share (\d+) MB and own (\d+) MB at first", found.found)
    assert told, found.found
    assert int(told[2]) > int(told[3]), "most pages are those of the process that it was forked from"


def test_why_nothing_can_be_forked_is_a_note(monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / "two_threads.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait).start()\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    found = fork_check(modules=("two_threads",))
    assert (found.status, found.found) == ("note", "the process to fork from has 2 threads instead of one")
