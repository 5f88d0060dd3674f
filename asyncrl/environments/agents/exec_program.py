"""Becomes the program of an agent, behind the guard that ends it with everything that it started."""

import os
import sys


async def serve_pipes() -> None:
    """Gives the program its standard input, and runs it in the place of this process. The guard keeps the pipe."""
    given, *words = sys.argv[2:]
    os.dup2(int(given), sys.stdin.fileno())
    os.close(int(given))
    try:
        os.execvp(words[0], words)
    except OSError as error:
        os.write(sys.stderr.fileno(), f"{words[0]} cannot be run: {error.strerror}\n".encode())
        os._exit(127)
