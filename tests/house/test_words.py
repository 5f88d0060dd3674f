"""Checks the words of the source: one class per name, docstrings that are sentences, no words of our own."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE_FOLDERS = ("asyncrl", "services", "protocols", "deploy", "bench")

OPENINGS = ("Of", "What", "Whether", "The same", "As", "Those", "Whoever", "Where", "How", "Which", "When")
"""Openings of docstrings that are no sentences."""

MAX_OPENINGS = 5
"""Docstrings of modules, classes, functions and constants that may still begin so."""
MAX_WITHOUT_VERB = 10
"""Docstrings of functions that may still begin with something else than a verb, as `Returns`."""
MAX_PARALLEL = 0.01
"""Share of assignments that may put several values into several names at once, as an exchange has to."""

REPLACED = {
    "foresee": "prefetch",
    "foresight": "prefetch",
    "suspects": "crash attribution",
    "guilty": "crash attribution",
    "blamed": "crash attribution",
    "evict": "kill",
    "together": "gather",
    "both": "gather",
    "taken_up": "run state",
    "lies_at": "stored at",
    "lying_at": "stored at",
    "lies_with": "stored by",
    "lying_with": "stored by",
    "patience": "timeout or deadline",
    "fate": "sample outcome",
    "judge": "score, scorer",
    "judged_at": "valued_at",
    "verdict": "score",
    "whole_sequences": "prefill",
    "single_tokens": "decode",
    "sings": "probe matches",
    "struck": "injected",
    "endure": "run trial",
    "weather": "fault schedule",
    "burial": "cleanup",
}
"""Words of our own with the word of the field; leading underscores and capitals of an identifier do not count."""

REPLACED_CLASSES = {
    "Books": "SampleTracker",
    "Notices": "RowReleases",
    "Order": "RunRequest",
    "Outbox": "RowReleases",
    "Page": "Algorithm",
    "Rolling": "Rollouts",
    "TakenUp": "RunState",
}
"""Names of classes with the word of the field: in lower case some of these words are ordinary English."""

ALLOWED = {
    "epoch": ("asyncrl/tasks/prompt_rows.py", "asyncrl/config/sources/aliases.toml"),
}
"""Words that mean one thing only, with the files in which they mean it."""


@cache
def trees() -> dict[str, ast.Module]:
    """Returns the syntax tree of each source file by its path; scripts of rivals run in environments of their own."""
    found = [path for folder in SOURCE_FOLDERS for path in (ROOT / folder).rglob("*.py")]
    real = [path for path in found if not any(parent.is_symlink() for parent in path.parents)]
    return {
        str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(real) if "rivals" not in path.parts
    }


def classes() -> Iterator[tuple[str, str]]:
    for file, tree in trees().items():
        yield from ((node.name, file) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def docstrings(*kinds: type[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yields the place and the text of each string that stands for itself in nodes of these kinds."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            for statement in getattr(node, "body", ()) if isinstance(node, kinds) else ():
                match statement:
                    case ast.Expr(ast.Constant(str(text))):
                        yield f"{file}:{statement.lineno}", text


def tuple_assignments() -> Iterator[str]:
    for file, tree in trees().items():
        for node in ast.walk(tree):
            targets = node.targets if isinstance(node, ast.Assign) else []
            for target in targets:
                if isinstance(target, ast.Tuple) and all(is_own_attribute(each) for each in target.elts):
                    yield f"{file}:{target.lineno}"


def is_own_attribute(node: ast.expr) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"


def snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().strip("_")


def defined_names(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Yields the names of classes, functions, parameters, attributes and variables where they are defined."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield (node.id if isinstance(node, ast.Name) else node.attr), node.lineno


def replaced_words() -> Iterator[str]:
    for file, tree in trees().items():
        for name, line in defined_names(tree):
            word = snake_case(name)
            if better := REPLACED.get(word) or REPLACED_CLASSES.get(name.strip("_")):
                yield f"{file}:{line} {name}: write {better}"
            elif word in ALLOWED and file not in ALLOWED[word]:
                yield f"{file}:{line} {name} means something else in {' and '.join(ALLOWED[word])}"


def test_a_class_name_is_defined_once() -> None:
    files = defaultdict(list)
    for name, file in classes():
        files[name].append(file)
    assert {name: places for name, places in files.items() if len(places) > 1} == {}


def test_docstrings_are_sentences() -> None:
    opening = re.compile(rf"({'|'.join(OPENINGS)})\b")
    found = docstrings(ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    fragments = [f"{place} {text.splitlines()[0]}" for place, text in found if opening.match(text)]
    assert len(fragments) <= MAX_OPENINGS, f"docstrings that begin with one of {OPENINGS}:\n" + "\n".join(fragments)


def test_docstrings_of_functions_begin_with_a_verb() -> None:
    """A string of a function that is no docstring describes an attribute; those of `__init__` begin with a noun."""
    verb = re.compile(r"[A-Z][a-z]+s\b")
    found = ((place, text) for file, tree in trees().items() for place, text in function_docstrings(file, tree))
    others = [f"{place} {text.splitlines()[0]}" for place, text in found if not verb.match(text)]
    assert len(others) <= MAX_WITHOUT_VERB, "docstrings of functions without a verb at the start:\n" + "\n".join(others)


def function_docstrings(file: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (text := ast.get_docstring(node)):
            yield f"{file}:{node.lineno}", text


def test_attributes_are_not_assigned_as_tuples() -> None:
    """Such as `self._a, self._b = 1, 2`, which hide attributes."""
    assert list(tuple_assignments()) == []


def test_two_statements_are_two_lines() -> None:
    assignments = [node for tree in trees().values() for node in ast.walk(tree) if isinstance(node, ast.Assign)]
    parallel = [
        node for node in assignments if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)
    ]
    assert len(parallel) <= MAX_PARALLEL * len(assignments), (
        f"{len(parallel)} of {len(assignments)} assign several values"
    )


def test_replaced_words_name_no_definition() -> None:
    assert list(replaced_words()) == []
