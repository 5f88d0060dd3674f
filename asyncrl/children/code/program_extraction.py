"""Finds the program in an answer of a policy. Nothing of the answer is parsed here: lines and words are read.

It is the last fenced block of Python, or else without a language. Beside it, a block that defines nothing and reads no
input is an example or an output; blocks that define what it uses, and does not define itself, come before it.
"""

import re
from collections.abc import Iterator, Mapping
from textwrap import dedent
from typing import Any, Literal

Choice = Literal["last", "first"]
FENCE = re.compile(r"(?P<indent>[ \t>]*(?:(?:[-*+]|\d+[.)])[ \t]+)?)(?P<marks>`{3,}|~{3,})(?P<info>[^`]*)")
LANGUAGE = re.compile(r"\w[\w+#-]*")
PYTHON = frozenset(("python", "python3", "python2", "py", "py3", "ipython", "ipython3"))
DEFINED = re.compile(r"^(?:(?:async[ \t]+)?(?:def|class)[ \t]+|(?=\w+[ \t]*=[ \t]*lambda\b))(\w+)", re.MULTILINE)
READS = re.compile(r"\binput[ \t]*\(|\bstdin\b|\bopen[ \t]*\([ \t]*0[ \t]*\)")
WORD = re.compile(r"\w+")
BEFORE = "before"
"""Column with text that is put before the code of an answer: the beginning of a function, imports."""


def code_in(answer: str, row: Mapping[str, Any], choose: Choice = "last") -> str:
    """Returns the program of an answer, of one without fenced blocks the whole text; what the row has in the column
    `before` comes first. An answer without a program has none, whatever is before it: "". choose: the last or the first
    of several programs."""
    before = row.get(BEFORE) or ""
    blocks = list(_blocks(answer))
    if not blocks:
        return f"{before}{answer}" if answer.strip() else ""
    program = _program([code for language, code in blocks if language in PYTHON], before, choose) or _program(
        [code for language, code in blocks if not language], before, choose
    )
    return "\n".join(filter(None, (before, program))) if program.strip() else ""


def _program(blocks: list[str], before: str, choose: Choice) -> str:
    """Returns the chosen one of these blocks, behind those that it needs; "" where there is none."""
    blocks = blocks if before else list(map(dedent, blocks))
    programs = [block for block in blocks if DEFINED.search(block) or READS.search(block)]
    if before:  # It may begin a function, whose body is the block.
        programs = [block for block in blocks if block in programs or block.strip("\n")[:1] in (" ", "\t")]
    programs = programs or blocks
    if choose == "first":
        return programs[0] if programs else ""
    program = ""
    for block in reversed(programs):
        missing = set(WORD.findall(program)).difference(DEFINED.findall(program))
        if not program or missing.intersection(DEFINED.findall(block)):
            program = block + program
    return program


def _blocks(answer: str) -> Iterator[tuple[str, str]]:
    """Yields the language, in lower case, and the code of each fenced block, without the indentation of its fence. The
    last one may lack its end."""
    lines = iter(answer.splitlines())
    for line in lines:
        if (opened := FENCE.fullmatch(line)) is None:
            continue
        indent = opened["indent"]
        marks = opened["marks"]
        found = LANGUAGE.search(opened["info"])
        code = []
        for inner in lines:
            closed = FENCE.fullmatch(inner)
            if closed and closed["marks"].startswith(marks) and not closed["info"].strip():
                break
            code.append(inner)
        spaces = " \t>" if ">" in indent else " \t"
        margin = min([len(indent), *(len(inner) - len(inner.lstrip(spaces)) for inner in code if inner.strip(spaces))])
        yield (found[0].lower() if found else ""), "".join(inner[margin:] + "\n" for inner in code)
