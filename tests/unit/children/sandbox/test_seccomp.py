"""The filter of system calls, followed instruction by instruction as the kernel does."""

import struct

import pytest

from asyncrl.children.sandbox import SandboxError
from asyncrl.children.sandbox.seccomp import ALLOW, ERROR, KILL, MACHINES, NEW_FORBIDDEN, seccomp_filter


def answer(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Runs the filter on one call; returns its action."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("<HBBI", program))
    at = loaded = 0
    while True:
        code, if_true, if_false, value = steps[at]
        at += 1
        if code == 0x20:
            (loaded,) = struct.unpack_from("<I", data, value)
        elif code == 0x06:
            return int(value)
        else:
            holds = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
            at += if_true if holds else if_false


FORBIDDEN = {
    *("ptrace", "process_vm_readv", "process_vm_writev", "kcmp", "move_pages", "mount", "umount2", "pivot_root"),
    *("chroot", "unshare", "setns", "add_key", "request_key", "keyctl", "bpf", "perf_event_open", "init_module"),
    *("finit_module", "delete_module", "kexec_load", "reboot", "swapon", "swapoff", "acct", "quotactl"),
    *("open_by_handle_at", "name_to_handle_at", "settimeofday", "clock_settime", "sethostname", "setdomainname"),
    *("lookup_dcookie", "nfsservctl", "fanotify_init", "vhangup", "kexec_file_load"),
}
ABSENT = {"userfaultfd", "memfd_create", "memfd_secret", "shmget", "msgget", "semget"}
ABSENT |= {"io_setup", "inotify_init1", "vmsplice", "mq_open"}
OF_INTEL = {"iopl", "ioperm", "modify_ldt", "uselib"}
"""What a program could reach other processes, the kernel or the machine with; iopl and its like are calls of x86."""


@pytest.mark.parametrize(("name", "more"), [("x86_64", OF_INTEL), ("aarch64", set())])
def test_no_dangerous_call_is_missing(name: str, more: set[str]) -> None:
    machine = MACHINES[name]
    assert set(machine.forbidden) == FORBIDDEN | more
    assert set(machine.refused) == {"syslog", "personality"}
    assert set(machine.absent) - {"inotify_init"} == ABSENT


@pytest.mark.parametrize("name", MACHINES)
def test_the_filter_decides_by_call_and_flags(name: str) -> None:
    machine = MACHINES[name]
    program = seccomp_filter(name)

    def action(number: int, *arguments: int) -> int:
        return answer(program, machine.audit, number, *arguments)

    for number in (*machine.forbidden.values(), *NEW_FORBIDDEN.values()):
        assert action(number) == KILL
    assert {action(number) for number in machine.absent.values()} == {ERROR | 38}
    assert {action(number) for number in machine.refused.values()} == {ERROR | 1}
    assert action(435) == ERROR | 38
    assert action(machine.clone, 17) == action(machine.clone, 0x3D0F00) == ALLOW
    assert [action(machine.clone, 17 | 1 << bit) for bit in range(25, 31)] == [KILL] * 6
    assert [action(machine.socket, family) for family in (1, 2, 10)] == [ALLOW] * 3
    assert [action(machine.socket, family) for family in (0, 16, 17, 38, 40)] == [ERROR | 97] * 5
    assert [action(machine.ioctl, 1, request) for request in (0x5412, 0x541C, 0x5401)] == [ERROR | 1, ERROR | 1, ALLOW]
    assert action(1) == ALLOW


@pytest.mark.parametrize("name", MACHINES)
def test_what_nothing_counts_is_refused_where_no_cgroup_limits_memory(name: str) -> None:
    machine = MACHINES[name]
    program = seccomp_filter(name, is_limited=False)
    limited = seccomp_filter(name)
    shared = [0x21, 0x23, 0x4021, 0x8021]
    for flags in shared:
        assert answer(program, machine.audit, machine.mmap, 0, 4096, 3, flags) == ERROR | 12
        assert answer(limited, machine.audit, machine.mmap, 0, 4096, 3, flags) == ALLOW
    for flags in (0x22, 0x01, 0x03, 0x20022, 0x100022):
        assert answer(program, machine.audit, machine.mmap, 0, 4096, 3, flags) == ALLOW
    sockets = [answer(program, machine.audit, machine.socket, family) == ALLOW for family in (1, 2, 10)]
    assert sockets == [True, False, False]


def test_calls_of_other_architectures_are_killed() -> None:
    program = seccomp_filter("x86_64")
    assert answer(program, 0x40000003, 1) == KILL
    assert answer(program, MACHINES["x86_64"].audit, 0x40000000 | 1) == KILL
    assert answer(seccomp_filter("aarch64"), MACHINES["x86_64"].audit, 1) == KILL


def test_an_unknown_machine_is_refused() -> None:
    with pytest.raises(SandboxError, match="riscv64; it knows x86_64, aarch64"):
        seccomp_filter("riscv64")
