"""Splits a completion into its thoughts and its answer: one reading for rewards, tools, judges and metrics."""

import re

PAIRS = (
    *((f"<{name}>", f"</{name}>") for name in ("think", "thinking", "thought", "reasoning", "seed:think")),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|channel>thought", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|channel|>final<|message|>"),
)
"""Marks that begin and end thoughts in the chat templates of reasoning models."""

_END = {begin: end for begin, end in PAIRS}
_LITERAL = r"""[\[({=:,]\s*+(["'])(?:(?!\1)[^\\\n]|\\.)*\1(?=\s*[\])}:,])"""  # What it quotes marks nothing.
_MARK = re.compile("|".join([_LITERAL, *(re.escape(mark) for pair in PAIRS for mark in pair)]))


def split_thoughts(text: str, opened: bool = False) -> tuple[str, str]:
    """Returns the thoughts of a completion, marks included, and the answer behind them; together they are `text`.
    opened: whether the prompt ended inside thoughts, as templates of reasoning models write it. A completion whose
    first mark ends thoughts was opened by its template too. Behind several thoughts the answer stands behind the last
    of them. Thoughts that do not end have no answer: it is empty."""
    end = 0
    unfinished = opened
    awaited = ""
    for mark in _MARK.finditer(text):
        if mark[0] in _END:
            if not unfinished:
                unfinished = True
                awaited = _END[mark[0]]
        elif not mark[1] and (not awaited or mark[0] == awaited):
            unfinished = False
            awaited = ""
            end = mark.end()
    return (text, "") if unfinished else (text[:end], text[end:])


def ends_in_thoughts(prompt: str, begun: str = "") -> bool:
    """Returns whether a rendered prompt ends inside thoughts, so that the completion begins there. begun: the answer in
    the prompt that the completion goes on with."""
    return prompt.rstrip().endswith(tuple(_END)) or split_thoughts(f"{begun}.")[1] == ""
