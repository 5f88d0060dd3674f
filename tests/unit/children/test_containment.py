"""Code of the user in a contained child: what it tries against the fleet, and what it may still do."""

import asyncio
import fcntl
import os
import re
import socket
import stat
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import pytest

from asyncrl.children import containment
from asyncrl.children.containment import (
    Containment,
    containment_of,
    exit_status,
    files_named,
    token_paths,
    try_containment,
)
from asyncrl.children.guarded_process import environment_of_child
from asyncrl.children.sandbox import SandboxError
from asyncrl.concurrency import one_error
from asyncrl.config.schema import Config
from asyncrl.config.secret_places import note_places, secrets_of_runs
from asyncrl.errors import DeadlineExceeded
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.functions import FunctionSpec
from asyncrl.rewards.sample import FunctionResult
from tests.unit.children.running import running
from tests.unit.rewards.execution.pools import sample

FUNCTIONS = r"""
import ctypes, glob, os, signal, socket, tempfile
import beside  # in the folder of this file

libc = ctypes.CDLL(None, use_errno=True)

def checked(result):
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

def tries(sample):
    exec(sample.text, globals())
    return 1.0

def pid(sample):
    return os.getpid()
"""

GONE = "FileNotFoundError"
READ_ONLY = "Read-only file system"
DENIED = "Operation not permitted"
DENIED_FILE = "PermissionError"
NO_PROCESS = "ProcessLookupError"
UNWRITABLE = "Read-only file system|Permission denied"
ATTACKS = {
    "variable of the fleet": ("os.environ['ASYNCRL_TELEMETRY__PASSWORD']", "KeyError"),
    "key of a sink": ("os.environ['WANDB_API_KEY']", "KeyError"),
    "key of a service": ("os.environ['OPENAI_API_KEY']", "KeyError"),
    "secret of a cloud": ("os.environ['AWS_SECRET_ACCESS_KEY']", "KeyError"),
    "token of a cluster": ("os.environ['RAY_AUTH_TOKEN']", "KeyError"),
    "variable of a name that nobody knows": ("os.environ['OF_MY_COMPANY']", "KeyError"),
    "proxy with a password": ("os.environ['HTTPS_PROXY']", "KeyError"),
    "keys that may join": ("assert os.listdir('JOINERS'), 'it is empty'", "it is empty"),
    "a key that may join": ("open('JOINERS/controller.key').read()", GONE),
    "token of scrapes": ("open('SCRAPE').read()", DENIED_FILE),
    "token of scrapes by a link": ("os.symlink('SCRAPE', '/tmp/s'); open('/tmp/s').read()", DENIED_FILE),
    "key of a host that joined": ("open('MYOWN').read()", DENIED_FILE),
    "keys of a cloud": ("open('HOME/.aws/credentials').read()", GONE),
    "token of the hub": ("open('HOME/.cache/huggingface/token').read()", DENIED_FILE),
    "token of the hub elsewhere": ("open('HUB/token').read()", DENIED_FILE),
    "token of a cluster in a file": ("open('HOME/.ray/auth_token').read()", DENIED_FILE),
    "passwords of hosts": ("open('HOME/.netrc').read()", DENIED_FILE),
    "keys of ssh": ("assert os.listdir('HOME/.ssh'), 'it is empty'", "it is empty"),
    "file that a variable names": ("open('SERVICE').read()", DENIED_FILE),
    "passwords of the machine": ("open('/etc/shadow').read()", "PermissionError"),
    "make a place of secrets visible": ("checked(libc.umount2(b'JOINERS', 2))", DENIED),
    "variables of the worker": ("open('/proc/WORKER/environ').read()", GONE),
    "memory of the worker": ("open('/proc/WORKER/mem', 'rb').read()", GONE),
    "files of the worker": ("os.listdir('/proc/WORKER/fd')", GONE),
    "trace the worker": ("checked(libc.ptrace(16, WORKER, 0, 0))", "No such process"),
    "segment in shared memory": ("open('/dev/shm/SEGMENT', 'rb').read()", GONE),
    "list shared memory": ("assert os.listdir('/dev/shm'), 'it is empty'", "it is empty"),
    "shared memory by its key": ("checked(libc.shmget(IPC, 0, 0))", "No such file"),
    "socket of the fleet": ("socket.socket(socket.AF_UNIX).connect('SOCKETS/gen0.work')", GONE),
    "socket of the fleet elsewhere": ("socket.socket(socket.AF_UNIX).connect('RUN/control')", GONE),
    "sockets of the machine": ("assert os.listdir('/run'), 'it is empty'", "it is empty"),
    "read the keys": ("open('RUN/keys').read()", GONE),
    "list the run directory": ("assert os.listdir('RUN'), 'it is empty'", "it is empty"),
    "write into the run directory": ("open('RUN/journal', 'a')", READ_ONLY),
    "replace the run directory": ("os.rename('RUN', 'RUN.old')", "OSError"),
    "run directory by a link": ("os.symlink('RUN', '/tmp/l'); open('/tmp/l/keys').read()", GONE),
    "run directory by the guard": ("open('/proc/1/root/RUN/keys').read()", GONE),
    "its own source": ("open(__file__, 'a')", READ_ONLY),
    "code of asyncrl": ("open(PACKAGE + '/errors.py', 'a')", UNWRITABLE),
    "kill the worker": ("os.kill(WORKER, signal.SIGKILL)", NO_PROCESS),
    "kill everybody": ("os.kill(-1, signal.SIGKILL)", NO_PROCESS),
    "kill the group of the worker": ("os.killpg(WORKER, signal.SIGKILL)", NO_PROCESS),
    "settings of the kernel": ("open('/proc/sys/kernel/core_pattern', 'r+')", UNWRITABLE),
    "write /proc": ("open('/proc/sys/vm/overcommit_memory', 'r+')", UNWRITABLE),
    "keys of a run beside this one": ("open('RUNS/other/commands.json').read()", DENIED_FILE),
    "key folder of a run beside this one": ("open('RUNS/other/join_keys/reward.key').read()", GONE),
    "run that began beside this one later": ("open('RUNS/later/commands.json').read()", GONE),
    "find a run that began later": ("assert 'later' in os.listdir('RUNS'), 'unseen'", "unseen"),
    "later run by the root of another process": ("open('/proc/1/root/RUNS/later/commands.json').read()", GONE),
    "leave a run beside this one": ("os.mkdir('RUNS/false')", READ_ONLY),
    "keys of a run elsewhere": ("open('ELSEWHERE/sweep/trial/secrets.json').read()", DENIED_FILE),
    "run that began elsewhere later": ("open('ELSEWHERE/sweep/later/secrets.json').read()", GONE),
    "key of another host here": ("open('ELSEWHERE/generation.key').read()", DENIED_FILE),
    "uncover runs beside this one": ("checked(libc.umount2(b'RUNS', 2))", DENIED),
    "uncover the run directory": ("checked(libc.umount2(b'RUN', 2))", DENIED),
    "mount": ("checked(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))", DENIED),
    "make the root writable": ("checked(libc.mount(None, b'/', None, 0x1020, None))", DENIED),
    "another root": ("os.chroot('/tmp')", DENIED),
    "space of processes of the worker": ("checked(libc.setns(os.open('/proc/1/ns/mnt', 0), 0))", DENIED),
    "disk": ("assert [d for d in glob.glob('/dev/*d[a-z]')], 'there is none'", "there is none"),
    "make a disk": ("os.mknod('/tmp/d', 0o60600, os.makedev(254, 0))", DENIED),
    "join a group": ("os.setgroups([0])", DENIED),
    "network": ("socket.create_connection(('127.0.0.1', PORT), 5)", "refused"),
    "abstract socket": ("socket.socket(socket.AF_UNIX).connect('\\0ABSTRACT')", "refused"),
}
"""Programs that try to get out, with what the error says. Words in capitals are filled in."""


@pytest.fixture(autouse=True, scope="module")
def bubblewrap() -> None:
    try:
        try_containment(Containment())
    except SandboxError as error:
        pytest.skip(str(error))


@pytest.fixture
def outside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """Makes what a fleet has, variables, shared memory, sockets, a run directory with keys; yields words to fill in."""
    run = tmp_path / "runs" / "mine"
    sockets = tmp_path / "sockets"
    run.mkdir(parents=True)
    sockets.mkdir()
    (run / "keys").write_text("secret")
    elsewhere = tmp_path / "elsewhere"
    for path in ("runs/other/commands.json", "runs/other/join_keys/reward.key", "runs/other/metrics.jsonl"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("secret")
    (elsewhere / "sweep" / "trial").mkdir(parents=True)
    for path in ("sweep/trial/config.toml", "sweep/trial/secrets.json", "generation.key"):
        (elsewhere / path).write_text("secret")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with monkeypatch.context() as patched:
        patched.setattr("tempfile.tempdir", str(sockets))
        note_places([elsewhere / "sweep" / "trial", elsewhere / "generation.key", tmp_path / "is gone"])
    (tmp_path / "beside.py").write_text("")
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    monkeypatch.setenv("ASYNCRL_TELEMETRY__PASSWORD", "secret")
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    for name in ("OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "RAY_AUTH_TOKEN", "OF_MY_COMPANY"):
        monkeypatch.setenv(name, "secret")
    monkeypatch.setenv("HTTPS_PROXY", "http://user:secret@proxy:8080")
    home = tmp_path / "home"
    paths = ("keys/controller.key", "scrape", "joined.key", "hub/token", "service.json", "home/.ssh/id", "home/.netrc")
    more = ("home/.aws/credentials", "home/.cache/huggingface/token", "home/.ray/auth_token")
    for path in (*paths, *more):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("secret")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "service.json"))
    abstract = f"asyncrl-test-{os.getpid()}"
    with ExitStack() as scope:
        for address in (f"{sockets}/gen0.work", f"{run}/control", f"\0{abstract}"):
            listening = scope.enter_context(socket.socket(socket.AF_UNIX))
            listening.bind(address)
            listening.listen()
        port = scope.enter_context(socket.create_server(("127.0.0.1", 0)))
        segment = SharedMemory(create=True, size=64)
        scope.callback(segment.unlink)
        scope.callback(segment.close)
        words = {"RUN": str(run), "SOCKETS": str(sockets), "SEGMENT": segment.name, "ABSTRACT": abstract}
        words |= {"PORT": str(port.getsockname()[1]), "WORKER": str(os.getpid()), "IPC": "4711"}
        words |= {"RUNS": str(run.parent), "ELSEWHERE": str(elsewhere)}
        words |= {"JOINERS": f"{tmp_path}/keys", "SCRAPE": f"{tmp_path}/scrape", "MYOWN": f"{tmp_path}/joined.key"}
        words |= {"HOME": str(home), "HUB": f"{tmp_path}/hub", "SERVICE": f"{tmp_path}/service.json"}
        yield words | {"PACKAGE": repr(str(containment.PACKAGE / "asyncrl"))}


def write_secrets(*paths: str, content: str = "secret") -> None:
    for path in map(Path, paths):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


MakePool = Callable[..., Any]


def plain_pool(spec: FunctionSpec, folder: Path, **limits: Any) -> AbstractAsyncContextManager[ChildPool]:
    """A pool of one child, contained unless `limits` say otherwise."""
    usual = {"workers": 1, "deadline": 20.0, "start_deadline": 60.0, "printed": folder / "printed"}
    return running(lambda tasks: ChildPool([spec], tasks, **{**usual, "containment": Containment(), **limits}))


@pytest.fixture
def pool(tmp_path: Path, outside: dict[str, str]) -> MakePool:
    @asynccontextmanager
    async def make(name: str = "tries", workers: int = 1, **changes: Any) -> AsyncIterator[ChildPool]:
        spec = FunctionSpec(f"{tmp_path}/functions.py:{name}", name)
        config = Config.model_validate(
            {
                "model": {"name": "tiny"},
                "task": {"prompts": "addition"},
                "fleet": {"join_keys": outside["JOINERS"]},
                "telemetry": {"prometheus": "127.0.0.1:0", "prometheus_token": outside["SCRAPE"]},
                "children": {"network": False},
            }
        )
        hidden = [outside[name] for name in ("SOCKETS", "MYOWN")]
        contained = containment_of(config, [spec.use], hidden, Path(outside["RUN"]))
        assert contained is not None
        variables = changes.pop("variables", ())
        limits = {"workers": workers, "variables": variables, "containment": replace(contained, **changes)}
        async with plain_pool(spec, tmp_path, **limits) as made:
            yield made

    return make


async def test_nothing_of_the_fleet_is_in_reach_and_scoring_goes_on(pool: MakePool, outside: dict[str, str]) -> None:
    async with pool() as made:
        write_secrets(f"{outside['RUNS']}/later/commands.json", f"{outside['ELSEWHERE']}/sweep/later/secrets.json")
        for name, (attack, error) in ATTACKS.items():
            for word, text in sorted(outside.items(), reverse=True):
                attack = attack.replace(word, text)
            (result,) = await made.run(0, [sample(attack)])
            assert re.search(error, result.reason), (name, result)
        assert await made.run(0, [sample("pass")]) == [FunctionResult(1.0)]
    assert sorted(os.listdir(outside["RUN"])) == ["control", "keys"]


async def test_a_child_that_starts_again_reads_no_keys_of_runs_that_began_meanwhile(
    pool: MakePool, outside: dict[str, str]
) -> None:
    async with pool() as made:
        later = f"{outside['RUNS']}/later/join_keys/reward.key"
        write_secrets(later)
        assert "status 7" in (await made.run(0, [sample("os._exit(7)")]))[0].reason
        (result,) = await made.run(0, [sample(f"open({later!r}).read()")])
        assert GONE in result.reason
        assert await made.run(0, [sample(f"open('{outside['RUNS']}/other/metrics.jsonl').read()")]) == [
            FunctionResult(1.0)
        ]


@pytest.mark.parametrize("file", ["functions.py", "mine/code/functions.py"])
async def test_code_beside_runs_and_in_a_run_directory_is_seen(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs lie in the folder of the code, which is the current one; one run has code in its directory."""
    monkeypatch.chdir(tmp_path)
    write_secrets(f"{tmp_path}/{file}", f"{tmp_path}/data.txt", content=FUNCTIONS.replace("import beside", "#"))
    spec = FunctionSpec(f"{tmp_path}/{file}:tries", "tries")
    seen = Containment(visible=files_named([spec.use]), runs=(str(tmp_path / "mine"),))
    async with plain_pool(spec, tmp_path, containment=seen) as made:
        write_secrets(f"{tmp_path}/later/commands.json")
        (result,) = await made.run(0, [sample(f"open('{tmp_path}/data.txt').read(); os.listdir('{tmp_path}/later')")])
        assert GONE in result.reason
        assert f"{tmp_path}/later" in result.reason


def test_notes_of_what_is_gone_go_and_temporary_files_need_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "reward.key").write_text("secret")
    note_places([keys])
    assert secrets_of_runs([]) == (set(), set())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "cache"))
    note_places([keys, tmp_path / "never was"])
    assert secrets_of_runs([]) == ({str(keys / "reward.key")}, set())
    (keys / "reward.key").unlink()
    assert secrets_of_runs([]) == (set(), set())
    assert list((tmp_path / "cache").rglob("secret_places/*")) == []


@pytest.mark.parametrize("attack", ["os.kill(os.getppid(), signal.SIGKILL)", "os.kill(1, signal.SIGSTOP)"])
async def test_a_child_cannot_stop_its_guard_or_neighbours(pool: MakePool, attack: str) -> None:
    async with pool(workers=2) as made:
        attacked, fine = await asyncio.gather(made.run(0, [sample(attack)]), made.run(0, [sample("pass", 1)]))
        assert attacked == fine == [FunctionResult(1.0)]


async def test_signals_are_reported_as_without_containment(pool: MakePool) -> None:
    async with pool() as made:
        results = await made.run(0, [sample(f"os.kill(os.getpid(), {number})") for number in (9, 11)])
        assert "its process was ended by SIGKILL" in results[0].reason
        assert "its process was ended by SIGSEGV" in results[1].reason
        (result,) = await made.run(0, [sample("os._exit(7)")])
        assert result.reason == "its process ended with status 7"


HOLDS = """
import fcntl, os, time
lock = open({lock!r}, 'w')
fcntl.flock(lock, fcntl.LOCK_EX)
if not os.fork():
    os.setsid()
    lock.write('held')
    lock.flush()
    time.sleep(1000)
"""
"""Leaves a process in a session of its own, which holds a lock on a file outside."""


async def test_all_that_a_child_started_ends_with_the_pool(pool: MakePool, tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    async with pool(writable=(str(tmp_path),)) as made:
        assert await made.run(0, [sample(HOLDS.format(lock=str(lock)))]) == [FunctionResult(1.0)]
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


BLOCKED = """#!/bin/sh
sleep 1000 &
echo $! >{pid}
wait
"""
"""What bubblewrap is before its child may begin: a process that waits for its own child, which waits for it."""


async def test_a_start_that_hangs_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "bwrap"
    pid = tmp_path / "pid"
    fake.write_text(BLOCKED.format(pid=pid))
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("asyncrl.children.guarded_process.GUARD_TIMEOUT", 0.1)
    with pytest.raises(DeadlineExceeded, match="could not be loaded within 3 s"), one_error():
        async with plain_pool(FunctionSpec("exact_match", "exact_match"), tmp_path, start_deadline=3.0):
            pass
    async with asyncio.timeout(60):
        while await asyncio.to_thread(alive, pid.read_text().strip()):
            await asyncio.to_thread(os.sched_yield)


async def test_a_host_on_which_nothing_can_be_contained_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = tmp_path / "bwrap"
    fails.write_text(
        '#!/bin/sh\necho "bwrap: Can\'t mount proc on /newroot/proc: Operation not permitted" >&2\nexit 1\n'
    )
    fails.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SandboxError, match=r"Can't mount proc .* systempaths=unconfined"), one_error():
        async with plain_pool(FunctionSpec("exact_match", "exact_match"), tmp_path):
            pass


def alive(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


PARENT = """
import asyncio, sys
from pathlib import Path
from asyncrl.children.containment import Containment
from asyncrl.rewards import Sample
from asyncrl.rewards.execution.child_pool import ChildPool
from asyncrl.rewards.functions import FunctionSpec

async def main(folder, attack):
    options = {"workers": 1, "deadline": 60, "start_deadline": 60, "printed": Path(folder, "printed")}
    async with asyncio.TaskGroup() as tasks:
        contained = Containment(writable=(folder,))
        pool = ChildPool([FunctionSpec(folder + "/functions.py:tries", "f")], tasks, containment=contained, **options)
        await pool.start()
        await pool.run(0, [Sample("p", attack, {}, 0, 0, "stop", 1)])
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.mark.usefixtures("outside")
async def test_all_that_a_child_started_ends_with_a_worker_that_is_killed(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    words = [str(tmp_path), HOLDS.format(lock=str(lock))]
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, *words)
    async with asyncio.timeout(60):
        while not await asyncio.to_thread(lambda: lock.exists() and lock.read_text()):
            await asyncio.to_thread(os.sched_yield)
        parent.kill()
        await parent.wait()
        with await asyncio.to_thread(lock.open) as file:
            await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)


async def test_folders_that_are_to_be_written_are(pool: MakePool, tmp_path: Path) -> None:
    async with pool(writable=(str(tmp_path / "runs"),)) as made:
        assert await made.run(0, [sample(f"open({str(tmp_path / 'runs' / 'cache')!r}, 'w').write('x')")]) == [
            FunctionResult(1.0)
        ]
        (result,) = await made.run(0, [sample(f"open({str(tmp_path / 'runs/mine/keys')!r}, 'w')")])
        assert READ_ONLY in result.reason
        temporary = "with tempfile.NamedTemporaryFile(dir='/tmp') as f: f.write(b'x')"
        assert await made.run(0, [sample(temporary)]) == [FunctionResult(1.0)]
    assert (tmp_path / "runs" / "cache").read_text() == "x"


async def test_variables_are_the_harmless_and_the_named_ones(pool: MakePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE", "given")
    names = ["HOME", "PATH", "MY_SERVICE", "OPENAI_API_KEY"]
    async with pool(variables=("MY_SERVICE", "NOT_SET")) as made:
        told = f"raise ValueError([name for name in {names} if name in os.environ])"
        (result,) = await made.run(0, [sample(told)])
        assert "['HOME', 'PATH', 'MY_SERVICE']" in result.reason


SECRET = [
    ("https_proxy", "user:word@127.0.0.1:1"),
    ("HTTP_PROXY", "http://user:word@proxy:3128"),
    ("ASYNCRL_SEED", "1"),
]
SECRET += [("HF_ENDPOINT", "http://127.0.0.1/?token=word"), ("PYTHONSECRETTOKEN", "word"), ("NCCL_PASSWORD", "word")]
SECRET += [("OMP_API_KEY", "word"), ("XDG_SECRET_TOKEN", "word"), ("ASYNCRL_SEED", "1")]
HARMLESS = [
    ("https_proxy", "http://proxy:3128"),
    ("PATH", "/opt/python@3.11/bin:/usr/bin"),
    ("PYTHONPATH", "/srv/code"),
]
HARMLESS += [("TOKENIZERS_PARALLELISM", "false"), ("HF_ENDPOINT", "https://mirror/hub?mirror=1")]


@pytest.mark.parametrize(("name", "value"), SECRET)
def test_a_variable_that_may_hold_a_secret_is_no_harmless_one(name: str, value: str) -> None:
    assert environment_of_child({name: value}) == {}
    assert environment_of_child({name: value}, [name]) == ({} if name.startswith("ASYNCRL_") else {name: value})


@pytest.mark.parametrize(("name", "value"), HARMLESS)
def test_harmless_variables_reach_children(name: str, value: str) -> None:
    assert environment_of_child({name: value}) == {name: value}


@pytest.mark.parametrize(
    ("variable", "inner"),
    [("XDG_CACHE_HOME", "huggingface/token"), ("PGPASSFILE", ""), ("CARGO_HOME", "credentials.toml"), ("HISTFILE", "")],
)
def test_tokens_that_a_variable_has_moved_are_hidden(variable: str, inner: str, tmp_path: Path) -> None:
    paths = [os.path.realpath(each) for each in token_paths({variable: str(tmp_path)})]
    assert os.path.realpath(tmp_path / inner) in paths


async def test_the_network_is_there_unless_it_is_taken_away(pool: MakePool, outside: dict[str, str]) -> None:
    async with pool(network=True) as made:
        reached = f"socket.create_connection(('127.0.0.1', {outside['PORT']}), 5)"
        assert await made.run(0, [sample(reached)]) == [FunctionResult(1.0)]


async def test_a_child_starts_sandboxes_unless_it_is_root(pool: MakePool) -> None:
    async with pool() as made:
        opened = "from asyncrl.children.sandbox.bubblewrap import try_sandbox; try_sandbox()"
        (result,) = await made.run(0, [sample(opened)])
        if os.geteuid() == 0:
            assert "starts no sandboxes where the fleet is root: run the fleet as another user" in result.reason
        else:
            assert result == FunctionResult(1.0)


def views(contained: Containment) -> list[str]:
    command = contained.command()
    return command[command.index("--dev") + 2 : -1]


def test_inner_folders_come_after_outer_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run inside the folder of its code is hidden, and code inside the run is seen."""
    monkeypatch.chdir("/")
    code = tmp_path / "code"
    run = tmp_path / "code" / "runs"
    (run / "own").mkdir(parents=True)
    found = views(Containment((str(run),), (str(code), str(run / "own"))))
    places = [found.index(str(path)) for path in (code, run, run / "own")]
    assert places == sorted(places)
    assert [found[place - 1] for place in places] == ["--ro-bind", "--tmpfs", "--ro-bind"]


def test_a_folder_of_code_that_is_tmp_itself_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    assert "--ro-bind /tmp /tmp" not in " ".join(views(Containment(visible=("/tmp",))))


def test_files_are_found_in_names_and_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "server.py", "data.json"):
        (tmp_path / name).write_text("")
    found = files_named([f"trl:{tmp_path}/mine.py:f", "mcp:python server.py data.json"])
    assert set(found) == {str(tmp_path), *(str(tmp_path / name) for name in ("mine.py", "server.py", "data.json"))}


def test_a_machine_without_bubblewrap_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"apt-get install bubblewrap.*sandbox = \"none\" in the section \[children"):
        try_containment(Containment())
    fails = tmp_path / "bwrap"
    fails.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fails.chmod(fails.stat().st_mode | stat.S_IXUSR)
    with pytest.raises(SandboxError, match=r"here: bwrap: No permissions .* allow user namespaces"):
        try_containment(Containment())


def test_statuses_of_bubblewrap_are_those_of_the_child() -> None:
    assert [exit_status(status) for status in (0, 7, 128 + 9)] == [0, 7, -9]
