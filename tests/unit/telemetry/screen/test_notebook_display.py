"""Checks the one output that a cell of a notebook shows while it trains: each step replaces it."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest

from asyncrl.config.schema import Config
from asyncrl.telemetry.display import LineDisplay, NotebookDisplay, open_cell_or_terminal

CONFIG = Config.model_validate({"model": {"name": "m"}, "task": {"prompts": "p"}, "steps": 10})
STEP = {"step": 4, "version": 4, "reward/mean": 0.5, "time/training/busy": 0.9}


@pytest.fixture
def outputs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Takes the place of a notebook; returns what its output held, the newest last."""
    found: list[str] = []
    handle = SimpleNamespace(update=lambda html: found.append(html.data))

    def display(html: Any, display_id: bool) -> Any:
        assert display_id
        found.append(html.data)
        return handle

    shell = SimpleNamespace(config={"IPKernelApp": {}})
    shown = SimpleNamespace(HTML=lambda text: SimpleNamespace(data=text), display=display)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", shown)  # type: ignore[arg-type]
    return found


def test_a_cell_has_one_bar_which_each_step_moves(outputs: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with open_cell_or_terminal(CONFIG) as display:
        assert isinstance(display, NotebookDisplay)
        display.say("run directory: runs/a<b")
        display.progress("starting the workers")
        display.step({**STEP, "step": 3, "version": 3, "reward/mean": 0.25}, None)
        display.step(STEP, None)
    first, starting, _, last = outputs
    assert first == ""
    assert "starting the workers" in starting
    assert 'value="4" max="10"' in last
    assert "step 4 of 10\nreward 0.500\nreward 0.250 ▁█ 0.500\ntraining is the slowest: it is busy 90%" in last
    assert capsys.readouterr().out == "run directory: runs/a<b\n", "what stays is printed, and nothing else"


def test_what_is_shown_is_text_and_no_markup(outputs: list[str]) -> None:
    display = open_cell_or_terminal(CONFIG)
    display.progress("<script>")
    assert "&lt;script&gt;" in outputs[-1]


def test_without_a_notebook_it_is_the_display_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_cell_or_terminal(CONFIG), LineDisplay)
    shell = SimpleNamespace(config={"TerminalIPythonApp": {}})
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    assert isinstance(open_cell_or_terminal(CONFIG), LineDisplay)
