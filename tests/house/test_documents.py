"""Documents name functions, files and folders that exist, and the walkthrough has every stop of a group's life."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import asyncrl
from asyncrl import rewards

ROOT = Path(__file__).parents[2]
HISTORY = {"CHANGELOG.md", "docs/log.md"}
"""Pages about the past, whose names may be gone."""

PAGES = {
    str(path.relative_to(ROOT)): path.read_text()
    for path in sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
    if str(path.relative_to(ROOT)) not in HISTORY
}
FOLDERS = ("asyncrl", "services", "protocols", "deploy", "bench", "tests", "docs", "scripts")
PATH = re.compile(rf"`((?:{'|'.join(FOLDERS)})/[\w./-]*)(?::([\w.]+))?`")
NAMED = sorted({(page, path, name) for page, text in PAGES.items() for path, name in PATH.findall(text)})
LINKS = sorted(
    {(page, link) for page, text in PAGES.items() for link in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)}
)
STOP = re.compile(r"^(\d+)\. `[\w/]+\.py:[\w.]+`", re.MULTILINE)
STEPS = re.compile(r"^\d+\. ", re.MULTILINE)


@cache
def defined(path: Path) -> set[str]:
    """Functions, classes, methods and constants of a module: `name`, or `Class.name`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                found.add(node.name)
            case ast.ClassDef():
                methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                found |= {node.name, *(f"{node.name}.{method.name}" for method in methods)}
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                found.add(name)
    return found


@pytest.mark.parametrize(("page", "path", "name"), NAMED)
def test_paths_and_names_in_documents_exist(page: str, path: str, name: str) -> None:
    assert (ROOT / path).exists(), f"{page} names {path}"
    if name:
        assert name in defined(ROOT / path), f"{page} names {path}:{name}"


@pytest.mark.parametrize(("page", "link"), LINKS)
def test_links_in_documents_resolve(page: str, link: str) -> None:
    assert (ROOT / page).parent.joinpath(link).exists(), f"{page} links to {link}"


def test_the_python_api_page_has_all_public_names() -> None:
    shown = re.findall(r"^::: [\w.]+\.(\w+)$", PAGES["docs/reference/api.md"], re.MULTILINE)
    assert sorted(shown) == sorted({*asyncrl.__all__, *rewards.__all__})


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    shown = set(re.findall(r": ([\w/-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert pages == shown - {"index.md", "contributing.md", "changelog.md"}


def test_the_walkthrough_has_some_thirty_stops_each_with_a_function() -> None:
    text = PAGES["docs/walkthrough.md"]
    stops = STOP.findall(text)
    assert len(stops) == len(STEPS.findall(text))
    assert stops == [str(number) for number in range(1, len(stops) + 1)]
    assert 28 <= len(stops) <= 36


def test_the_glossary_is_sorted_and_has_each_word_once() -> None:
    words = re.findall(r"^- \*\*([^*]+)\*\*: ", PAGES["docs/glossary.md"], re.MULTILINE)
    assert len(words) > 30
    assert sorted(words, key=lambda word: word.replace("η", "eta").lower()) == words
    assert len(set(words)) == len(words)


def test_the_tests_of_transports_that_the_table_of_faults_names_exist() -> None:
    folder = ROOT / "tests/unit/lanes/weights/transports"
    there = {name.removeprefix("test_") for path in folder.glob("test_*.py") for name in defined(path)}
    page = (folder / "FAULTS.md").read_text()
    lines = re.findall(r"^- ([CFKTP]), in `test_\w+\.py`: (.*)$", page, re.MULTILINE)
    named = {letter: set(re.findall(r"`(\w+)`", names)) for letter, names in lines}
    assert all(named[letter] <= there for letter in "CFKTP")
    cells = set(re.findall(r"\b([CTP])(\d+)\b", page[page.index("| fault |") : page.index("C1 to C5,")]))
    explained = {(letter, number) for letter, names in lines for number in re.findall(r"\b(\d+) `", names)}
    assert cells == explained


def test_no_page_has_marks_of_a_merge() -> None:
    """Pages about the past too."""
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    marked = [page.name for page in pages if re.search(r"^(<{7} |={7}$|>{7} )", page.read_text(), re.MULTILINE)]
    assert marked == []


FROM_AN_INDEX = re.compile(
    r"\b(pip3?|uv|pipx|poetry) (install|add)( +(-[\w-]+|[\w-]+==[\w.]+))* +[\"']?asyncrl(?![\w/.-])(?!.{0,30} @ )"
)
"""A command that installs asyncrl by its name, which no package index has before the first release."""
TEXTS = [
    path
    for pattern in ("*.md", "docs/**/*.md", "asyncrl/**/*", "deploy/**/*", "bench/**/*", "services/**/*", "scripts/*")
    for path in ROOT.glob(pattern)
    if path.is_file() and path.suffix in {".md", ".py", ".toml", ".yaml", ".sbatch", ".j2", ".html", "", ".sh", ".txt"}
]


def test_no_text_installs_asyncrl_from_an_index() -> None:
    found = [f"{path}: {each[0]}" for path in TEXTS for each in FROM_AN_INDEX.finditer(path.read_text(errors="ignore"))]
    assert not found, "write pip install -e '.[NAME]', in a checkout"


@pytest.mark.parametrize(
    ("command", "is_dead"),
    [
        ("pip install asyncrl", True),
        ('pip install "asyncrl[hub]"', True),
        ("pip install 'asyncrl[s3,ray]'", True),
        ("python -m pip install -U asyncrl[cu12]", True),
        ("uv pip install asyncrl", True),
        ("pipx install asyncrl", True),
        ("uv add asyncrl", True),
        ("pip install -e '.[hub]'", False),
        ("pip install -e . && asyncrl run quickstart", False),
        ("pip install 'asyncrl[ray] @ file:///src/asyncrl'", False),
        ("~/asyncrl/bin/pip install '/opt/asyncrl[ray]'", False),
        ("pip install peft, then asyncrl export", False),
    ],
)
def test_what_counts_as_an_installation_from_an_index(command: str, is_dead: bool) -> None:
    assert bool(FROM_AN_INDEX.search(command)) is is_dead
