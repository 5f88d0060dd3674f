"""Compiles the files of `inside/` with the interpreter of the programs, once for each pool."""

import subprocess
from pathlib import Path

from asyncrl.children.sandbox.program_requests import SandboxError

INSIDE = Path(__file__).parent / "inside"
FIRST = "first_process"
PARTS = ("program_server", "examiner", "package_server")
COMPILE_TIMEOUT = 30.0

COMPILER = """
import marshal, sys
sources = marshal.loads(sys.stdin.buffer.read())
code_of = lambda name: compile(sources[name], name + ".py", "exec", dont_inherit=True, optimize=2)
sys.stdout.buffer.write(marshal.dumps({name: marshal.dumps(code_of(name)) for name in sources}))
"""
MODULE = f"{__package__}.inside.{FIRST}"
"""Name under which the other files import the first."""
STARTER = (
    "import marshal,sys;f=open(int(sys.argv[1]),'rb');p=marshal.loads(f.read());f.close();"
    f"m=sys.modules['{MODULE}']=type(sys)('{MODULE}');"
    f"exec(marshal.loads(p['{FIRST}']),m.__dict__);m.main(p,int(sys.argv[2]))"
)
"""Code that a sandbox is started with; its arguments are descriptors: of the compiled files, and of the socket."""


def compiled_harness(python: str) -> bytes:
    """Returns the code of all files inside, as `python` compiles it; raises SandboxError if that fails."""
    import marshal  # Data goes into the sandbox, never out of it.

    sources = {name: (INSIDE / f"{name}.py").read_text() for name in (FIRST, *PARTS)}
    done = subprocess.run(
        [python, "-I", "-S", "-c", COMPILER],
        input=marshal.dumps(sources, 2),
        capture_output=True,
        timeout=COMPILE_TIMEOUT,
        check=False,
    )
    if done.returncode:
        raise SandboxError(f"{python} cannot compile the harness of the sandbox: {done.stderr.decode()[-300:]}")
    return done.stdout
