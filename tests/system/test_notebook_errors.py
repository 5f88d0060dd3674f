"""What a cell shows of an error: one output of the type `error`, with the line of the user and advice in Python."""

import os
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nbclient", reason="a kernel runs the cells")
pytest.importorskip("ipykernel", reason="a kernel runs the cells")
pytestmark = pytest.mark.fleet

HERE = Path(__file__).parent
SET_UP = """\
from faulty_run import use_standins
use_standins()
import asyncrl
ROWS = [{"prompt": f"count from {number}:", "answer": "1"} for number in range(8)]
def train(**arguments):
    return asyncrl.train_async(**{
        "model": "warmed:reverse", "prompts": ROWS, "reward": lambda sample: len(sample.text), "steps": 2,
        "run_dir": "run", "task": {"prompts_per_step": 2, "samples_per_prompt": 2}, "generation": {"max_new_tokens": 4},
        **arguments,
    })
"""
REWARD = "def mine(sample):\n    return {}\nawait train(reward=mine)"
AGAIN = 'await train()\nawait train(run_dir="run", training={"learning_rate": 0.5}, steps=3)'


def outputs_of(cell: str, folder: Path) -> list[dict[str, Any]]:
    import nbformat
    from nbclient import NotebookClient

    new = nbformat.v4
    notebook = new.new_notebook(cells=[new.new_code_cell(source) for source in (SET_UP, cell)])
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=120, kernel_name="python3", allow_errors=True, resources=resources).execute(
        env={**os.environ, "IPYTHONDIR": str(folder / "ipython"), "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parents[1]}"}
    )
    return [dict(output) for output in notebook.cells[1].outputs]


@pytest.mark.parametrize(
    ("cell", "kind", "says"),
    [
        (REWARD.format('float(sample.row["anser"])'), "RewardError", "did you mean answer?"),
        (REWARD.format("1 / 0"), "RewardError", "it raised ZeroDivisionError"),
        (REWARD.format('"good"'), "RewardError", "is not a number but 'good'"),
        (REWARD.format("None"), "RewardError", "it returned None"),
        (REWARD.format("float('nan')"), "RewardError", "a reward is finite"),
        ('await train(steps=2, on_step=lambda metrics: metrics["rewards"])', "KeyError", "rewards"),
        ("await train(algorithm=asyncrl.Algorithm(train, train))", "ConfigError", "its roll_out "),
        ("await train(algoritm=3)", "ConfigError", "algorithm"),
        (AGAIN, "ConfigError", "another run_dir, or take the change over with accept_changes=True"),
        ('from pathlib import Path\nPath("run").write_text("")\nawait train()', "ConfigError", "another with run_dir"),
    ],
)
def test_an_error_is_the_error_of_the_cell(cell: str, kind: str, says: str, tmp_path: Path) -> None:
    outputs = outputs_of(cell, tmp_path)
    (error,) = [output for output in outputs if output["output_type"] == "error"]
    assert error["ename"] == kind
    shown = "\n".join(error["traceback"])
    assert says in shown
    assert not re.search(r"--[a-z]", shown)
    assert not [output for output in outputs if output.get("name") == "stderr"]
    files = [line for line in shown.splitlines() if line.lstrip().startswith("File ")]
    if kind == "RewardError":
        assert len(shown) < 2000
        assert not files or "ipykernel" in files[0] or "/tmp/" in files[0], "the first frame is the user's"
