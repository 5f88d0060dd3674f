"""Builds the filter of system calls that bubblewrap installs: a classic BPF program in bytes (seccomp(2), bpf(4)).

load architecture ── another ──> kill
load number ── forbidden ──> kill     ── unwanted ──> refuse with an error     ── clone, socket, ... ──> look at flags
            └─ anything else ──> allow
"""

import platform
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from asyncrl.children.sandbox.program_requests import SandboxError

LOAD = 0x20
JUMP_EQUAL = 0x15
JUMP_AT_LEAST = 0x35
JUMP_ANY_BIT = 0x45
RETURN = 0x06
"""Codes of the few instructions of classic BPF that the filter needs; each works on 32 bits."""
NUMBER = 0
ARCHITECTURE = 4
FIRST_ARGUMENT = 16
SECOND_ARGUMENT = 24
FOURTH_ARGUMENT = 40
"""Offsets in `struct seccomp_data`. Both machines are little-endian: the low half of an argument comes first."""
KILL = 0x80000000
ERROR = 0x00050000
ALLOW = 0x7FFF0000
EPERM = 1
ENOMEM = 12
ENOLCK = 37
ENOSYS = 38
EAFNOSUPPORT = 97
NO_FAMILY = ERROR | EAFNOSUPPORT
X32 = 0x40000000
"""Numbers from here on are calls of the x32 ABI on x86_64, which would pass by the list."""

NAMESPACES = 0x00000080 | 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
"""Flags of clone(2) that make namespaces: time, mount, cgroup, uts, ipc, user, pid, net."""
LOCAL_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET and AF_INET6 stay inside the network namespace. Others do not: AF_VSOCK reaches the hypervisor."""
TERMINAL_INJECTION = (0x5412, 0x541C)
"""TIOCSTI and TIOCLINUX put characters into a terminal."""
LEASES_AND_NOTES = (1024, 1026)
"""F_SETLEASE holds others back who open a file of the machine, F_NOTIFY tells of what they do in a folder."""
MAP_SHARED = 0x01
MAP_ANONYMOUS = 0x20


def _numbers(text: str) -> dict[str, int]:
    """Reads names of system calls with their numbers."""
    return {name: int(number) for name, number in (pair.split() for pair in text.split(","))}


NEW_FORBIDDEN = _numbers(
    "open_tree 428, move_mount 429, fsopen 430, fsconfig 431, fsmount 432, fspick 433, pidfd_getfd 438, "
    "process_madvise 440, mount_setattr 442, quotactl_fd 443, open_tree_attr 467"
)
"""Calls from 424 on have the same number on every machine."""
NEW_ABSENT = _numbers("io_uring_setup 425, io_uring_enter 426, io_uring_register 427, clone3 435")
"""Calls that programs try and do without. The flags of clone3 are in memory, where a filter cannot look."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Numbers of system calls on one architecture. forbidden: no program of ours needs them, they end the process.
    refused: they fail with EPERM. absent: they fail with ENOSYS, and libraries then do something else; some make memory
    that belongs to no process, where no limit would count it, or take from what the whole machine shares: slots of
    asynchronous I/O, news of what others open in /usr."""

    audit: int
    flock: int  # which needs no right to write: it would hold locks on files of the machine.
    fcntl: int
    forbidden: Mapping[str, int]
    refused: Mapping[str, int]
    absent: Mapping[str, int]
    clone: int
    socket: int
    ioctl: int
    mmap: int


MACHINES = {
    "x86_64": Machine(
        0xC000003E,
        73,
        72,
        _numbers(
            "ptrace 101, process_vm_readv 310, process_vm_writev 311, kcmp 312, move_pages 279, mount 165, "
            "umount2 166, pivot_root 155, chroot 161, unshare 272, setns 308, add_key 248, request_key 249, "
            "keyctl 250, bpf 321, perf_event_open 298, init_module 175, finit_module 313, "
            "delete_module 176, kexec_load 246, kexec_file_load 320, reboot 169, swapon 167, swapoff 168, "
            "acct 163, quotactl 179, open_by_handle_at 304, name_to_handle_at 303, settimeofday 164, "
            "clock_settime 227, sethostname 170, setdomainname 171, iopl 172, ioperm 173, modify_ldt 154, "
            "uselib 134, lookup_dcookie 212, nfsservctl 180, fanotify_init 300, vhangup 153"
        ),
        _numbers("syslog 103, personality 135"),
        _numbers(
            "userfaultfd 323, memfd_create 319, memfd_secret 447, shmget 29, msgget 68, semget 64, io_setup 206, "
            "inotify_init 253, inotify_init1 294, vmsplice 278, mq_open 240"
        ),
        clone=56,
        socket=41,
        ioctl=16,
        mmap=9,
    ),
    "aarch64": Machine(
        0xC00000B7,
        32,
        25,
        _numbers(
            "ptrace 117, process_vm_readv 270, process_vm_writev 271, kcmp 272, move_pages 239, mount 40, "
            "umount2 39, pivot_root 41, chroot 51, unshare 97, setns 268, add_key 217, request_key 218, "
            "keyctl 219, bpf 280, perf_event_open 241, init_module 105, finit_module 273, "
            "delete_module 106, kexec_load 104, kexec_file_load 294, reboot 142, swapon 224, swapoff 225, "
            "acct 89, quotactl 60, open_by_handle_at 265, name_to_handle_at 264, settimeofday 170, "
            "clock_settime 112, sethostname 161, setdomainname 162, lookup_dcookie 18, nfsservctl 42, "
            "fanotify_init 262, vhangup 58"
        ),
        _numbers("syslog 116, personality 92"),
        _numbers(
            "userfaultfd 282, memfd_create 279, memfd_secret 447, shmget 194, msgget 186, semget 190, io_setup 0, "
            "inotify_init1 26, vmsplice 75, mq_open 180"
        ),
        clone=220,
        socket=198,
        ioctl=29,
        mmap=222,
    ),
}


def seccomp_filter(machine: str = "", *, is_limited: bool = True) -> bytes:
    """Returns the filter for this machine, or for the named one; raises SandboxError for one without numbers.
    is_limited: the kernel limits the memory of the sandbox. Otherwise memory that no look at a process shows is
    refused: anonymous memory that processes share, and buffers of TCP and UDP."""
    name = machine or platform.machine()
    if (numbers := MACHINES.get(name)) is None:
        raise SandboxError(f"the sandbox has no numbers of system calls for {name}; it knows {', '.join(MACHINES)}")
    return b"".join(
        [
            _instruction(LOAD, ARCHITECTURE),
            _instruction(JUMP_EQUAL, numbers.audit, 1, 0),
            _instruction(RETURN, KILL),
            _instruction(LOAD, NUMBER),
            *([_instruction(JUMP_AT_LEAST, X32, 0, 1), _instruction(RETURN, KILL)] if name == "x86_64" else []),
            *_answers([*numbers.forbidden.values(), *NEW_FORBIDDEN.values()], KILL),
            *_answers(numbers.refused.values(), ERROR | EPERM),
            *_answers([*numbers.absent.values(), *NEW_ABSENT.values()], ERROR | ENOSYS),
            *_answers([numbers.flock], ERROR | ENOLCK),
            *_for_call(numbers.fcntl, SECOND_ARGUMENT, list(_answers(LEASES_AND_NOTES, ERROR | EPERM))),
            *_for_call(numbers.clone, FIRST_ARGUMENT, [_instruction(JUMP_ANY_BIT, NAMESPACES, 0, 1), _return(KILL)]),
            *_for_call(numbers.socket, FIRST_ARGUMENT, _only(LOCAL_FAMILIES[: 3 if is_limited else 1], NO_FAMILY)),
            *([] if is_limited else _for_call(numbers.mmap, FOURTH_ARGUMENT, WITHOUT_SHARED)),
            *_for_call(numbers.ioctl, SECOND_ARGUMENT, list(_answers(TERMINAL_INJECTION, ERROR | EPERM))),
            _return(ALLOW),
        ]
    )


def _instruction(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    """Packs one `struct sock_filter`; the jumps count the instructions to skip."""
    return struct.pack("<HBBI", code, if_true, if_false, value)


def _return(action: int) -> bytes:
    return _instruction(RETURN, action)


def _answers(values: Iterable[int], action: int) -> Iterable[bytes]:
    """Yields instructions that return the action when the loaded number is one of the values."""
    for value in values:
        yield _instruction(JUMP_EQUAL, value, 0, 1)
        yield _return(action)


def _only(values: Iterable[int], otherwise: int) -> list[bytes]:
    """Returns instructions that allow the values and answer all others."""
    return [*_answers(values, ALLOW), _return(otherwise)]


def _for_call(number: int, argument: int, checks: list[bytes]) -> list[bytes]:
    """Returns instructions that load the low half of an argument of this call and check it; then they allow it."""
    body = [_instruction(LOAD, argument), *checks, _return(ALLOW)]
    return [_instruction(JUMP_EQUAL, number, 0, len(body)), *body]


WITHOUT_SHARED = [
    _instruction(JUMP_ANY_BIT, MAP_SHARED, 1, 0),
    _return(ALLOW),
    _instruction(JUMP_ANY_BIT, MAP_ANONYMOUS, 0, 1),
    _return(ERROR | ENOMEM),
]
"""Instructions that refuse anonymous memory with the flag of sharing, which two of the kinds of sharing have."""
