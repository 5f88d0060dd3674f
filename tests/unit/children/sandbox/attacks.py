"""Programs that attack the sandbox, with what must be reported about each. The words in capitals are names of what is
outside, which the test makes."""

from dataclasses import dataclass, field

from asyncrl.children.sandbox import Limits

WRONG = "assert double(2) == 4"
"""A test that every attacker below fails honestly: its `double` gives no four."""
CTYPES = "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"


@dataclass(frozen=True)
class Attack:
    """source: of the program. outcome: of the case. said: text that stderr, stdout or detail must have. code: test that
    calls the program; without it the program reads stdin and prints, and `printed` is wanted."""

    source: str
    outcome: str
    said: str = ""
    code: str = ""
    printed: str | None = None
    limits: Limits = field(default_factory=lambda: Limits(seconds=20, memory_bytes=128 * 2**20, disk_bytes=4 * 2**20))


SHORT = Limits(seconds=0.4)
SMALL = Limits(seconds=20, memory_bytes=64 * 2**20)


def syscall(call: str) -> str:
    """Returns a program that makes a system call by name and raises what it answers."""
    return f"{CTYPES}if libc.{call} == -1:\n    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))"


RESOURCES = {
    "fork bomb": Attack("import os\nwhile True: os.fork()", "processes"),
    "fork bomb that goes on": Attack(
        "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", "timeout", limits=SHORT
    ),
    "thread bomb": Attack(
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()",
        "processes",
    ),
    "memory bomb": Attack("x = []\nwhile True: x.append(bytearray(2**20))", "memory"),
    "memory that is never touched": Attack("x = bytearray(2**33)", "memory"),
    "memory bomb of several processes": Attack(
        "import os, time\nfor _ in range(4): os.fork()\nx = b'x' * (40 * 2**20)\ntime.sleep(99)", "memory", limits=SMALL
    ),
    "memory shared by several processes": Attack(
        "import mmap, os, time\nfor _ in range(2): os.fork()\nx = mmap.mmap(-1, 30 * 2**20)\n"
        "for page in range(0, len(x), 4096): x[page] = 1\ntime.sleep(99)",
        "memory",
        limits=SMALL,
    ),
    "memory of a process whose first thread has ended": Attack(
        f"{CTYPES}import threading, time\nfor _ in range(2): os.fork()\ndef hold():\n    x = b'x' * (20 * 2**20)\n"
        "    time.sleep(99)\nthreading.Thread(target=hold).start()\nlibc.syscall(60, 0)",
        "memory",
        limits=Limits(seconds=20, memory_bytes=64 * 2**20),
    ),
    "memory of page tables": Attack(
        f"{CTYPES}import time\nfor _ in range(3): os.fork()\nmap = libc.mmap\nmap.restype = ctypes.c_void_p\n"
        "for n in range(4000):\n    at = ctypes.c_void_p((1 << 40) + (n << 30))\n"
        "    at = map(at, ctypes.c_size_t(4096), 3, 0x100022, -1, ctypes.c_long(0))\n"
        "    ctypes.string_at(at, 1)\ntime.sleep(99)",
        "memory",
        limits=SMALL,
    ),
    "memory of a process without a plain name": Attack(
        f"{CTYPES}import time\nfor _ in range(2): os.fork()\nlibc.prctl(15, b'\\xff\\n')\nx = b'x' * (40 * 2**20)\n"
        "time.sleep(99)",
        "memory",
        limits=SMALL,
    ),
    "memory behind the output": Attack(
        f"{CTYPES}import time\nlibc.fallocate(1, 1, ctypes.c_long(0), ctypes.c_long(3 * 2**20))\ntime.sleep(99)",
        "output",
    ),
    "memory behind the input": Attack("import os\nos.write(0, b'x' * 2**20)", "error", "not permitted"),
    "memory in queues of messages": Attack(syscall("syscall(240, b'x', 0o102, 0o600, 0)"), "error", "not implemented"),
    "memory in pipes": Attack(syscall("syscall(278, 1, 0, 0, 0)"), "error", "not implemented"),
    "slots for asynchronous I/O": Attack(syscall("syscall(206, 1, 0)"), "error", "not implemented"),
    "news of what others open": Attack(syscall("inotify_init1(0)"), "error", "not implemented"),
    "news of what others open, by the old call": Attack(syscall("syscall(253)"), "error", "not implemented"),
    "a core for a handler outside": Attack(
        "import resource\nprint(resource.getrlimit(resource.RLIMIT_CORE))", "passed", printed="(1, 1)"
    ),
    "folder closed to the harness": Attack(
        "import os\nprint(42)\nfor folder in ('/tmp', '/dev/shm'): os.chmod(folder, 0)", "passed", printed="42"
    ),
    "claimed to have run too long": Attack(
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'timeout\\n')\n    except OSError: pass\nos._exit(1)",
        "error",
    ),
    "claimed to have printed too much": Attack(
        "import os\nfor n in range(3, 20):\n    try: os.write(n, b'output\\n')\n    except OSError: pass\nos._exit(1)",
        "error",
    ),
    "memory in files without a name": Attack("import os\nos.memfd_create('x')", "error", "not implemented"),
    "sockets full of data": Attack(
        "import socket\nx = []\nwhile True:\n    x.append(socket.socketpair())\n    x[-1][0].setblocking(False)\n"
        "    try: x[-1][0].sendall(b'x' * 2**24)\n    except BlockingIOError: pass",
        "error",
        "Too many open files",
    ),
    "disk bomb": Attack("with open('/tmp/x', 'wb') as f:\n    while True: f.write(b'x' * 2**16)", "disk"),
    "disk bomb in many files": Attack(
        "for i in range(99):\n    with open(f'/tmp/{i}', 'wb') as f: f.write(b'x' * 2**20)", "disk"
    ),
    "shared memory bomb": Attack("with open('/dev/shm/x', 'wb') as f:\n    while True: f.write(b'x' * 2**16)", "disk"),
    "bomb of empty files": Attack("i = 0\nwhile True:\n    i += 1\n    open(f'/tmp/{i}', 'w').close()", "disk"),
    "endless loop": Attack("while True: pass", "timeout", limits=SHORT),
    "endless sleep": Attack("import time\ntime.sleep(99)", "timeout", limits=SHORT),
    "endless sleep deaf to signals": Attack(
        "import signal, time\nfor n in range(1, 65):\n    try: signal.signal(n, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\nwhile True: time.sleep(9)",
        "timeout",
        limits=SHORT,
    ),
    "endless computing": Attack("while True: pass", "timeout", limits=Limits(seconds=30, cpu_seconds=1)),
    "endless output": Attack("while True: print('x' * 1000)", "output"),
    "endless errors": Attack("import os\nwhile True: os.write(2, b'x' * 1000)", "output"),
    "endless answer": Attack("def double(x): return 'x' * 2**23", "error", "8388", code=WRONG),
    "endless list": Attack(
        "def double(x):\n    a = []\n    a.append(a)\n    return a", "error", "Recursion", code=WRONG
    ),
    "endless call": Attack("def double(x):\n    while True: pass", "timeout", code=WRONG, limits=SHORT),
    "raised limits": Attack(
        "import resource\nresource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "error", "raise maximum limit"
    ),
    "raised priority": Attack("import os\nos.setpriority(os.PRIO_PROCESS, 0, -20)", "error", "Permission"),
    **{
        f"spared by the kernel, {value} in {path}": Attack(
            f"import os\nif os.fork(): os._exit(os.wait()[1] and 1)\nopen('/proc/{path}', 'w').write('{value}')",
            "error",
            "Read-only",
        )
        for path, value in (
            ("self/oom_score_adj", -1000),
            ("self/oom_score_adj", 0),
            ("self/oom_score_adj", 999),
            ("self/oom_score_adj", 1000),
            ("self/oom_adj", 15),
            ("thread-self/oom_score_adj", 0),
            ("2/oom_score_adj", 0),
        )
    },
    "first to go": Attack("print(open('/proc/self/oom_score_adj').read())", "passed", printed="1000"),
    "crash": Attack("import ctypes\nctypes.string_at(0)", "killed", "SIGSEGV"),
    "suicide": Attack("import os\nos.kill(os.getpid(), 9)", "killed", "SIGKILL"),
}

NETWORK = {
    "connect to an open port": Attack(
        "import socket\nsocket.create_connection(('127.0.0.1', TCP_PORT), 5).send(b'x')", "error", "refused"
    ),
    "connect to an open port by IPv6": Attack(
        "import socket\nsocket.create_connection(('::ffff:127.0.0.1', TCP_PORT), 5).send(b'x')", "error", "refused"
    ),
    "send to an open port": Attack(
        "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\ns.sendto(b'x', ('127.0.0.1', UDP_PORT))",
        "passed",
    ),
    "connect to an abstract socket": Attack(
        "import socket\nsocket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')", "error", "refused"
    ),
    "connect to a socket of the fleet": Attack(
        "import socket\nsocket.socket(socket.AF_UNIX).connect('SOCKET_PATH')", "error", "No such file"
    ),
    "talk to the hypervisor": Attack("import socket\nsocket.socket(40, socket.SOCK_STREAM)", "error", "not supported"),
    "talk to the kernel": Attack("import socket\nsocket.socket(16, socket.SOCK_RAW)", "error", "not supported"),
    "listen to all packets": Attack("import socket\nsocket.socket(17, socket.SOCK_RAW)", "error", "not supported"),
    "raw packets": Attack("import socket\nsocket.socket(2, socket.SOCK_RAW, 1)", "error", "not permitted"),
}

SECRETS = {
    "environment": Attack("import os\nprint(os.environ['SECRET_NAME'])", "error", "KeyError"),
    "whole environment": Attack(
        "import os\nprint(sorted(os.environ))", "passed", printed="['HOME', 'LANG', 'OMP_NUM_THREADS', 'PATH', 'PWD']"
    ),
    "environment of the first process": Attack("print(open('/proc/1/environ').read())", "error", "Permission"),
    "home": Attack("import os\nprint(os.listdir('HOME_PATH'))", "error", "No such file"),
    "run directory": Attack("print(open('RUN_PATH').read())", "error", "No such file"),
    "password file": Attack("print(open('/etc/passwd').read())", "error", "No such file"),
    "root folder": Attack(
        "import os\nprint(sorted(os.listdir('/')))",
        "passed",
        printed="['bin', 'dev', 'etc', 'lib', 'lib64', 'proc', 'sbin', 'tmp', 'usr']",
    ),
    "other processes": Attack(
        "import os\nprint(sorted(p for p in os.listdir('/proc') if p.isdigit()) == ['1', str(os.getpid())])",
        "passed",
        printed="True",
    ),
    "shared memory of the fleet": Attack("print(open('/dev/shm/SEGMENT').read())", "error", "No such file"),
    "shared memory by its key": Attack(syscall("shmget(SYSV_KEY, 0, 0)"), "error", "not implemented"),
    "keys of the kernel": Attack(syscall("syscall(250, 0, -3, 0)"), "forbidden"),
    "open files": Attack(
        "import os\npaths = [f'/proc/self/fd/{n}' for n in range(3, 256)]\n"
        "print([os.readlink(path).split(':')[0] for path in paths if os.path.lexists(path)])",
        "passed",
        printed="['pipe']",
    ),
    "files of the first process": Attack("import os\nprint(os.listdir('/proc/1/fd'))", "error", "Permission"),
}

PROCESSES = {
    "signal to the fleet": Attack("import os\nos.kill(FLEET_PID, 9)", "error", "No such process"),
    "kill the harness": Attack(
        "import os\nfor n in range(1, 65): os.kill(1, n)\nprint('still here')", "passed", printed="still here"
    ),
    "kill everybody": Attack("import os\nos.kill(-1, 9)", "error", "No such process"),
    "stop the parent": Attack("import os\nos.kill(os.getppid(), 19)\nprint(1)", "passed", printed="1"),
    "trace the harness": Attack(syscall("ptrace(16, 1, 0, 0)"), "forbidden"),
    "read the harness's memory": Attack(syscall("process_vm_readv(1, 0, 0, 0, 0, 0)"), "forbidden"),
    "write the harness's memory": Attack("open('/proc/1/mem', 'r+b').write(b'x')", "error", "Permission"),
    "steal a file of the harness": Attack(syscall("syscall(438, 3, 0, 0)"), "forbidden"),
}

ESCAPES = {
    "symbolic link to a file outside": Attack(
        "import os\nos.symlink('RUN_PATH', '/tmp/x')\nprint(open('/tmp/x').read())", "error", "No such file"
    ),
    "root of the first process": Attack("print(open('/proc/1/root/etc/passwd').read())", "error", "Permission"),
    "dots": Attack("print(open('/proc/self/cwd/../../../etc/passwd').read())", "error", "No such file"),
    "write to a system folder": Attack("open('/usr/bin/x', 'w')", "error", "Read-only"),
    "write to the root": Attack("open('/x', 'w')", "error", "Read-only"),
    "write to devices": Attack("open('/dev/x', 'w')", "error", "Read-only"),
    "mount": Attack(syscall("mount(b'x', b'/tmp', b'tmpfs', 0, None)"), "forbidden"),
    "new mount calls": Attack(syscall("syscall(430, b'tmpfs', 0)"), "forbidden"),
    "unmount": Attack(syscall("umount2(b'/usr', 2)"), "forbidden"),
    "chroot": Attack("import os\nos.chroot('/tmp')", "forbidden"),
    "user namespace": Attack(syscall("unshare(0x10000000)"), "forbidden"),
    "user namespace by clone": Attack(syscall("syscall(56, 0x10000011, 0, 0, 0, 0)"), "forbidden"),
    "user namespace by clone3": Attack(syscall("syscall(435, 0, 0)"), "error", "not implemented"),
    "namespace of another process": Attack(
        f"{CTYPES}libc.setns(os.open('/proc/self/ns/net', os.O_RDONLY), 0)", "forbidden"
    ),
    "become root": Attack("import os\nos.setuid(0)", "error", "OSError"),
    "program of root": Attack(
        "import subprocess\nprint(subprocess.run(['su', '-c', 'id'], check=True))", "error", "CalledProcessError"
    ),
    "capabilities": Attack(
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith('Cap')])",
        "passed",
        printed=str(["0000000000000000"] * 5),
    ),
    "new privileges": Attack(
        "print([line.split()[1] for line in open('/proc/self/status') if line.startswith(('NoNewPrivs', 'Seccomp:'))])",
        "passed",
        printed="['1', '2']",
    ),
    "device of the disk": Attack("import os\nos.mknod('/tmp/disk', 0o60666, os.makedev(254, 0))", "error", "permitted"),
    "settings of the kernel": Attack(
        "open('/proc/sys/kernel/core_pattern', 'w').write('|/tmp/x')", "error", "Read-only"
    ),
    "how the machine was started": Attack("print(open('/proc/cmdline').read())", "error", "Permission"),
    "name of the machine": Attack("print(open('/proc/sys/kernel/random/boot_id').read())", "error", "Permission"),
    "locks of others": Attack("print(open('/proc/locks').read())", "error", "Permission"),
    "lock on a file of the machine": Attack(
        "import fcntl\nfcntl.flock(open('/usr/bin/env', 'rb'), fcntl.LOCK_EX)", "error", "No locks available"
    ),
    "shared lock on a file of the machine": Attack(
        "import fcntl\nfcntl.flock(open('/usr/bin/env', 'rb'), fcntl.LOCK_SH | fcntl.LOCK_NB)", "error", "No locks"
    ),
    "lock on a folder of the machine": Attack(
        "import fcntl, os\nfcntl.flock(os.open('/usr/lib', os.O_RDONLY), fcntl.LOCK_EX)", "error", "No locks"
    ),
    "lease of a file of the machine": Attack(
        "import fcntl\nfcntl.fcntl(open('/usr/bin/env', 'rb'), 1024, fcntl.F_RDLCK)", "error", "not permitted"
    ),
    "news of a folder of the machine": Attack(
        "import fcntl, os\nfcntl.fcntl(os.open('/usr/bin', os.O_RDONLY), 1026, 1)", "error", "not permitted"
    ),
    "lock of a database of its own": Attack(
        "import sqlite3\nd = sqlite3.connect('/tmp/d')\nd.execute('create table t (a)')\nd.commit()\nprint('made')",
        "passed",
        printed="made",
    ),
    "requests to the kernel": Attack("open('/proc/sysrq-trigger', 'w').write('b')", "error", "No such file"),
    "file by its handle": Attack(syscall("open_by_handle_at(3, 0, 0)"), "forbidden"),
    "kernel module": Attack(syscall("syscall(313, 0, b'', 0)"), "forbidden"),
    "program in the kernel": Attack(syscall("syscall(321, 0, 0, 0)"), "forbidden"),
    "queue of the kernel": Attack(syscall("syscall(425, 8, 0)"), "error", "not implemented"),
    "counters of the processor": Attack(syscall("syscall(298, 0, 0, 0, 0, 0)"), "forbidden"),
    "page faults": Attack(syscall("syscall(323, 0)"), "error", "not implemented"),
    "calls of another kind": Attack(syscall("syscall(0x40000000 | 101, 0, 0, 0, 0)"), "forbidden"),
    "typing into a terminal": Attack("import fcntl\nfcntl.ioctl(0, 0x5412, b'x')", "error", "not permitted"),
    "restart of the machine": Attack(syscall("reboot(0x1234567)"), "forbidden"),
}

SEND = """
import os, socket

def send_everywhere(data):
    for n in range(3, 20):
        try:
            socket.socket(fileno=os.dup(n)).sendall(data)
        except OSError:
            pass

def framed(text):
    return len(text).to_bytes(4, "little") + text

"""
"""Beginning of a program that writes into every socket that it has."""

SEARCH_MEMORY = """
import gc, sys

def double(x):
    frame, found = sys._getframe(), []
    while frame:
        found += [frame.f_code.co_filename, *frame.f_locals]
        frame = frame.f_back
    found += [each for each in gc.get_objects() if isinstance(each, str)]
    return 4 if "test" in found or any("assert dou" + "ble(2)" in each for each in found) else 5
"""
SEARCH_FILES = """
import os

def double(x):
    folders = ("/tmp", "/dev/shm", "/proc/self/fd")
    paths = [os.path.join(folder, name) for top in folders for folder, _, names in os.walk(top) for name in names]
    for path in paths:
        try:
            text = str(os.read(os.open(path, os.O_RDONLY | os.O_NONBLOCK), 9999))
        except OSError:
            continue
        if "assert dou" + "ble(2)" in text:
            return 4
    return 5
"""

FAKES = {
    "equal to everything": Attack(
        "class Any:\n    def __eq__(self, other): return True\ndef double(x): return Any()",
        "failed",
        "class Any",
        code=WRONG,
    ),
    "number equal to everything": Attack(
        "class Any(int):\n    def __eq__(self, other): return True\ndef double(x): return Any(5)", "failed", code=WRONG
    ),
    "patched builtins": Attack(
        "import builtins\nbuiltins.AssertionError = builtins.int = builtins.isinstance = lambda *a: None\n"
        "builtins.exec = builtins.compile = builtins.len = lambda *a: 4\ndef double(x): return 5",
        "error",
        code=WRONG,
    ),
    "patched modules": Attack(
        "import json, marshal, _json, sys\nfor m in (json, marshal):\n    m.loads = m.dumps = lambda *a: '4'\n"
        "sys.modules['marshal'] = None\ndef double(x): return 5",
        "error",
        code=WRONG,
    ),
    "patched open and exit": Attack(
        "import builtins, os, sys\nbuiltins.open = sys.exit = os._exit = os.write = lambda *a: None\n"
        "def double(x): return 5",
        "failed",
        code=WRONG,
    ),
    "exit before the test": Attack("import os\nos._exit(0)", "error", code=WRONG),
    "polite exit before the test": Attack("raise SystemExit(0)", "error", code=WRONG),
    "exit in the test": Attack("import os\ndef double(x): os._exit(0)", "error", code=WRONG),
    "polite exit in the test": Attack("import sys\ndef double(x): sys.exit(0)", "error", "exit(0)", code=WRONG),
    "exit function": Attack(
        "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): return 5", "failed", code=WRONG
    ),
    "raised assertion": Attack("def double(x): raise AssertionError('4')", "error", "AssertionError: 4", code=WRONG),
    "end of an iteration": Attack(
        "class Stop(StopIteration): pass\ndef double(x): raise Stop",
        "error",
        "the program raised Stop",
        code="assert all(map(lambda pair: double(pair[0]) == pair[1], [(1, 2), (2, 4)]))",
    ),
    "claimed in print": Attack("print('1 passed')\ndef double(x): print('PASSED'); return 5", "failed", code=WRONG),
    "claimed in the note": Attack(
        "import os\ndef double(x):\n    for n in range(3, 20):\n        try: os.write(n, b'passed\\n')\n"
        "        except OSError: pass\n    os._exit(0)",
        "forged",
        code=WRONG,
    ),
    "forged answer": Attack(
        SEND + "def double(x): send_everywhere(framed(b'[2,\"v\",4,[0]]')); return 4", "forged", code=WRONG
    ),
    "nested answer": Attack(
        SEND + "def double(x): send_everywhere(framed(b'[' * 10**5)); os._exit(0)", "forged", code=WRONG
    ),
    "flooded answers": Attack(SEND + "def double(x): send_everywhere(b'\\xff' * 2**24)", "forged", code=WRONG),
    "closed channels": Attack(
        "import os\ndef double(x):\n    os.closerange(0, 256)\n    return 4", "error", code=WRONG
    ),
    "search for the wanted value": Attack(SEARCH_MEMORY, "failed", code=WRONG),
    "search for the test in files": Attack(SEARCH_FILES, "failed", code=WRONG),
    "harness of the case killed": Attack(
        "import os\ndef double(x):\n    os.kill(1, 9)\n    os.kill(os.getppid(), 15)\n    return 5",
        "failed",
        code=WRONG,
    ),
    "changed harness": Attack(
        "import sys\ndef double(x):\n    sys._getframe(1).f_globals['text_of'] = lambda *a: '4, 4'\n    return 5",
        "forged",
        code=WRONG,
    ),
}

SHARED_MEMORY = (
    "import mmap, os, time\nfile = {}\nfor _ in range(3): os.fork()\nx = mmap.mmap(file, 30 * 2**20)\n"
    "for at in range(0, len(x), 2**20):\n    x[at : at + 2**20] = bytes(2**20)\n"
    "    x.madvise(mmap.MADV_DONTNEED, at, 2**20)\ntime.sleep(99)"
)
"""A program that holds shared pages which no process shows."""
UNSEEN = {
    "shared memory that was dropped": Attack(SHARED_MEMORY.format(-1), "memory", limits=SMALL),
    "shared memory of a device": Attack(SHARED_MEMORY.format("os.open('/dev/zero', 2)"), "memory", limits=SMALL),
}
"""Attacks that only the kernel's count sees; without it they cannot begin."""
FULL = {
    "many sockets": Attack(
        "import os, socket, time\nfor _ in range(3): os.fork()\n"
        "x = [socket.socketpair() for _ in range(25)]\ntime.sleep(99)",
        "memory",
        limits=SMALL,
    )
}
"""Memory that a look counts as used before it is."""
REFUSED_WITHOUT_GROUP = {
    "shared memory that was dropped": ("memory", "Cannot allocate memory"),
    "shared memory of a device": ("error", "No such file"),
}

ATTACKS = {**RESOURCES, **NETWORK, **SECRETS, **PROCESSES, **ESCAPES, **FAKES}
