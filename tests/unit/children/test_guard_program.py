"""The guard of a child holds no end of its pipes: who reads answers sees their end when the child closes them."""

import os
import select
import subprocess
import sys

PROGRAM = "import os; os.write(1, b'answer'); os.close(1); os.read(0, 1)"


def test_answers_end_when_the_child_closes_them_though_child_and_guard_live() -> None:
    given, hold = os.pipe()
    command = [sys.executable, "-m", "asyncrl.children.guard_program", "asyncrl.environments.agents.exec_program"]
    with subprocess.Popen(
        [*command, str(given), sys.executable, "-c", PROGRAM],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[given],
    ) as guard:
        assert guard.stdout is not None
        found = []
        while select.select([guard.stdout], [], [], 20)[0]:
            found.append(os.read(guard.stdout.fileno(), 100))
            if not found[-1]:
                break
        assert b"".join(found) == b"answer"
        assert found[-1] == b"", "the end comes although the program waits for its input"
        assert guard.poll() is None
        os.close(hold)
        assert guard.wait(20) == 0
    os.close(given)
