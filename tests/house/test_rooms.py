"""The rooms of the package: imports that run downwards, no two folders that import each other, no circles."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "asyncrl"
LINKS = ("services", "protocols", "deploy", "bench")

FLOORS = (
    ("errors", "version", "protocols", "objectives"),
    ("concurrency", "experiments"),
    ("config", "lanes"),
    ("telemetry", "children"),
    ("rewards", "environments"),
    ("fleet", "tasks"),
    ("controller",),
    ("engines", "algorithms"),
    ("services", "deploy"),
    ("simulation",),
    ("api",),
    ("bench",),
)
"""The rooms from the ground up; a room imports from the floors below its own, never from its own floor or above."""

FLOOR = {room: number for number, rooms in enumerate(FLOORS) for room in rooms}
TOP_FILES = {"__init__.py", "api.py", "errors.py", "concurrency.py", "version.py"}


def source_files() -> list[Path]:
    folders = (PACKAGE, *(ROOT / name for name in LINKS))
    found = [path for folder in folders for path in folder.rglob("*.py") if "rivals" not in path.parts]
    return sorted(path for path in found if not any(parent.is_symlink() for parent in path.parents))


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = parts if parts[0] == "asyncrl" else ("asyncrl", *parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {dotted(path): path for path in source_files()}


def imported(path: Path) -> Iterator[str]:
    """Every module of ours that the file imports, lazily and for type checking too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in FILES)
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in FILES else node.module for name in inner if node.module in FILES)


def room(module: str) -> str:
    return module.split(".")[1]


def folder(module: str) -> str:
    return module if FILES[module].name == "__init__.py" else module.rpartition(".")[0]


def edges() -> Iterator[tuple[str, str]]:
    for module, path in FILES.items():
        yield from ((module, target) for target in imported(path))


def test_the_package_holds_rooms_links_and_its_top_files() -> None:
    entries = {each.name for each in PACKAGE.iterdir() if each.suffix == ".py" or each.is_dir()} - {"__pycache__"}
    rooms = {name for name in entries if (PACKAGE / name).is_dir()} - set(LINKS)
    assert entries - rooms == {*LINKS, *TOP_FILES}
    assert rooms <= set(FLOOR)


def test_every_room_stands_on_a_floor() -> None:
    assert {room(module) for module in FILES if "." in module} == set(FLOOR)


def test_rooms_import_downwards_only() -> None:
    upwards = [
        f"{source} imports {target}"
        for source, target in edges()
        if "." in source and "." in target and room(source) != room(target)
        if FLOOR[room(target)] >= FLOOR[room(source)]
    ]
    assert upwards == []


def test_no_two_folders_import_each_other() -> None:
    """The files at the top of the package belong to no folder: the floors hold them."""
    between: dict[tuple[str, str], list[str]] = defaultdict(list)
    for source, target in edges():
        ends = folder(source), folder(target)
        if "asyncrl" not in ends and ends[0] != ends[1]:
            between[ends].append(f"{source} imports {target}")
    mutual = [between[pair] + between[pair[::-1]] for pair in between if pair[::-1] in between and pair < pair[::-1]]
    assert mutual == []


def circles() -> Iterator[list[str]]:
    """Yields the groups of modules that import each other, also through others: strongly connected components."""
    targets = defaultdict(set)
    for source, target in edges():
        targets[source].add(target)

    def reached(start: str) -> set[str]:
        found = set[str]()
        left = [start]
        while left:
            for target in targets[left.pop()] - found:
                found.add(target)
                left.append(target)
        return found

    from_each = {module: reached(module) for module in FILES}
    seen = set[str]()
    for module, others in from_each.items():
        if module in others and module not in seen:
            circle = sorted(other for other in others if module in from_each[other])
            seen.update(circle)
            yield circle


def test_no_modules_import_each_other_in_a_circle() -> None:
    """Imports for type checkers count."""
    assert list(circles()) == []


def started() -> set[str]:
    """Returns the modules that are entered without an import: commands, programs, also of the sandbox, and what whole
    texts name."""
    entered = ("asyncrl.algorithms.", "asyncrl.deploy.commands.", "asyncrl.children.sandbox.inside.")
    commands = {name for name in FILES if name.startswith(entered)}
    programs = {name for name, path in FILES.items() if '__name__ == "__main__"' in path.read_text()}
    shell = " ".join(path.read_text() for path in [*ROOT.glob("scripts/*"), *ROOT.glob("*.toml")] if path.is_file())
    texts = set(re.findall(r"[\w.]+", shell))
    for path in FILES.values():
        constants = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        texts |= {each for each in constants if isinstance(each, str)}
    whole = {each.removeprefix("asyncrl.").partition(":")[0] for each in texts}
    whole |= {each.rpartition(".")[0] for each in whole}  # Of a class in a module.
    files = {each.rpartition("/")[2] for each in texts if each.endswith(".py")}
    named = {name for name in FILES if name.removeprefix("asyncrl.") in whole or FILES[name].name in files}
    of_bench = {name for name in FILES if name.removeprefix("asyncrl.bench.") in whole}
    return commands | programs | named | of_bench


def test_everything_is_reached_from_what_is_started() -> None:
    """A module that only tests import is deleted, or gets its caller."""
    targets = defaultdict(list)
    for source, target in edges():
        targets[source].append(target)
    reached = set[str]()
    left = ["asyncrl.api", "asyncrl.deploy.cli", "asyncrl.bench.cli", *started()]
    while left:
        if (name := left.pop()) not in reached:
            reached.add(name)
            left += targets[name]
    unreached = {name for name in FILES if FILES[name].name != "__init__.py"} - reached
    assert unreached == set()
