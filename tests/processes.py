"""The tree of processes below one, as /proc tells it."""

from contextlib import suppress
from pathlib import Path


def descendants(pid: int) -> set[int]:
    """Returns the process ids of its children and of theirs; one that ends meanwhile has none."""
    children: set[int] = set()
    with suppress(FileNotFoundError, ProcessLookupError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            children.update(map(int, (thread / "children").read_text().split()))
    return children.union(*map(descendants, children))
