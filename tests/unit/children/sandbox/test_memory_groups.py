"""Memory cgroups: where they may be made, what is written into them, and what is left behind is removed."""

from pathlib import Path

import pytest

from asyncrl.children.sandbox import memory_groups
from asyncrl.children.sandbox.memory_groups import MemoryGroup, places
from asyncrl.deploy.checks import machine

TMPFS = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755"
V1 = "35 31 0:32 {} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
CPU = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu"
V2 = "41 31 0:38 {} /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 rw,nsdelegate"


def root_with(tmp_path: Path, own: str, mounted: str, passed_on: dict[str, str]) -> Path:
    """A file system with the files that are read. passed_on: controllers by folder."""
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(own)
    (tmp_path / "proc/self/mountinfo").write_text(mounted)
    for folder, controllers in passed_on.items():
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "cgroup.subtree_control").write_text(controllers)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "mounted", "passed_on", "found"),
    [
        ("4:memory:/a/b\n1:cpu:/\n0::/", f"{TMPFS}\n{CPU}\n{V1.format('/')}", {}, ["sys/fs/cgroup/memory/a/b"]),
        ("4:cpu,memory:/docker/1\n", V1.format("/docker/1"), {}, ["sys/fs/cgroup/memory"]),
        ("4:memory:/other\n", V1.format("/docker/1"), {}, []),
        ("1:cpu:/\n", CPU, {}, []),
        ("0::/u/app/x\n", V2.format("/"), {"sys/fs/cgroup/u/app": "cpu memory", "sys/fs/cgroup/u": "pids"}, ["u/app"]),
        ("0::/x\n", V2.format("/"), {"sys/fs/cgroup": "memory pids", "sys/fs/cgroup/x": ""}, ["sys/fs/cgroup"]),
        ("0::/\n", V2.format("/"), {"sys/fs/cgroup": ""}, []),
        ("0::/\n", V2.format("/"), {"sys/fs": "memory"}, []),
        ("0::/../y\n", V2.format("/"), {"sys/fs/cgroup": "memory"}, []),
        ("", "", {}, []),
    ],
)
def test_where_groups_may_be_made(
    tmp_path: Path, own: str, mounted: str, passed_on: dict[str, str], found: list[str]
) -> None:
    places_found = [str(each) for each in places(root_with(tmp_path, own, mounted, passed_on))]
    assert len(places_found) == len(found)
    assert all(each.endswith(end) for each, end in zip(places_found, found, strict=True))


def test_a_group_of_version_2_is_limited_without_swap(tmp_path: Path) -> None:
    for name in ("memory.max", "memory.swap.max"):
        (tmp_path / name).write_text("max")
    (tmp_path / "memory.events").write_text("low 0\noom 3\noom_kill 2\noom_group_kill 0\n")
    group = MemoryGroup(tmp_path)
    group.limit(2**20)
    assert (tmp_path / "memory.max").read_text() == str(2**20)
    assert (tmp_path / "memory.swap.max").read_text() == "0"
    assert group.ended() == 2


def test_what_cannot_be_limited_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"cgroup\.gone"):
        MemoryGroup(tmp_path / "cgroup.gone").limit(2**20)


def test_groups_of_processes_that_have_ended_are_removed(tmp_path: Path) -> None:
    ended, running = (tmp_path / memory_groups.NAME.format(number, 0) for number in (2**22 + 1, 1))
    for each in (ended, running):
        each.mkdir()
    memory_groups._sweep(tmp_path)
    assert running.exists()
    assert not ended.exists()


@pytest.mark.parametrize("most", [2**26, 2**28, 2**25])
def test_a_group_of_this_kernel_is_limited_up_and_down(most: int) -> None:
    folder, why = memory_groups.home()
    if folder is None:
        pytest.skip(f"no memory cgroup can be made here: {why}")
    group = memory_groups.new_group()
    assert group is not None
    try:
        group.limit(2**27)
        group.limit(most)
        name = next(each for each in ("memory.max", "memory.limit_in_bytes") if (group.folder / each).exists())
        assert int((group.folder / name).read_text()) == most
        assert group.ended() == 0
    finally:
        group.remove()
    assert not group.folder.exists()


def test_the_doctor_says_who_limits_memory(bubblewrap_works: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_home", lambda: (Path("/sys/fs/cgroup/x"), ""))
    with_groups = machine.sandbox_check()
    assert "the kernel limits their memory, by cgroups in /sys/fs/cgroup/x" in str(with_groups)
    monkeypatch.setattr(machine, "memory_home", lambda: (None, "/sys/fs/cgroup: Permission denied"))
    without = machine.sandbox_check()
    assert "no memory cgroup can be made (/sys/fs/cgroup: Permission denied): memory is looked at" in str(without)
    assert "Delegate=yes" in str(without)
