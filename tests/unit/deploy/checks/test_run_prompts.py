"""The prompts of a run with its model: what is said of them, which are left, and the steps that draw them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.controller.training_run import Questions
from asyncrl.deploy import run_setup
from asyncrl.deploy.checks.run_prompts import (
    RAW,
    PromptSets,
    lost_characters,
    prompt_tokenizer,
    questions_of,
    read_prompts,
    with_steps_of_epochs,
)
from asyncrl.deploy.run_fleet import RunRequest
from asyncrl.engines.models.warmed_up_model import build_tokenizer
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks import load_prompts
from asyncrl.tasks.prompt_sources import CurriculumDraw
from asyncrl.tasks.turn_template import turn_problems
from tests import golden

ROWS = [{"prompt": "x" * length} for length in (3, 30, 5, 9)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tokenizer of a model whose tokens are characters; its chat template writes four of them."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer(())
    tokenizer.chat_template = "say {% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return folder


def config(**sections: Any) -> Config:
    task = {"prompts": "p.jsonl", **sections.pop("task", {})}
    return Config.model_validate({"model": {"name": "m"}, "task": task, **sections})


def questions(
    settings: Config, model: Path, folder: Path, rows: Any = ROWS, **places: str
) -> tuple[Questions, list[str]]:
    said: list[str] = []
    sets = read_prompts(settings, rows)
    return questions_of(settings, sets, model, folder / "longest", places, said.append), said


def test_that_texts_stay_raw_is_said_where_nobody_has_chosen(model: Path, tmp_path: Path) -> None:
    assert questions(config(), model, tmp_path)[1] == [RAW]
    for silent in (
        config(task={"text_prompts": "chat"}),
        config(task={"system": "Be brief."}),
        config(model={"name": "warmed:reverse"}),
        config(environment={"use": "guess"}),
    ):
        assert questions(silent, model, tmp_path)[1] == []
    assert questions(config(), tmp_path, tmp_path)[1] == [], "a model without a template has raw texts only"
    chosen = {"task.text_prompts": "mine.toml:3"}
    assert questions(config(), model, tmp_path, **chosen)[1] == []


def test_long_prompts_are_left_out_before_they_are_drawn(model: Path, tmp_path: Path) -> None:
    held_out = tmp_path / "held.jsonl"
    held_out.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    settings = config(
        task={"max_prompt_tokens": 9, "long_prompts": "skip", "shuffle": False},
        evaluate={"prompts": str(held_out), "size": 2},
    )
    found, said = questions(settings, model, tmp_path)
    assert [found.training(group).prompt for group in range(4)] == ["xxx", "xxxxx", "x" * 9, "xxx"]
    assert found.where(1) == "task.prompts: the rows given as prompts, row 3"
    assert [prompt for prompt, _ in found.held_out[""]] == ["xxx", "xxxxx"]
    assert said[:2] == [
        "the rows given as prompts: 1 of 4 prompts have more than 9 tokens; they are left out",
        f"{held_out}: 1 of 4 prompts have more than 9 tokens; they are left out",
    ]
    assert "x" * 30 not in (tmp_path / "longest").read_text()


def test_prompts_are_shortened_to_what_the_template_leaves_room_for(model: Path, tmp_path: Path) -> None:
    settings = config(task={"max_prompt_tokens": 40, "long_prompts": "truncate", "text_prompts": "chat"})
    rows = [{"prompt": "abcdefghij" * 9}]
    found, said = questions(settings, model, tmp_path, rows)
    prompt = found.training(0).prompt
    assert isinstance(prompt, list)
    (message,) = prompt
    assert len(message["content"]) == 36
    assert rows[0]["prompt"].endswith(message["content"])
    assert len(said) == 1


def test_a_curriculum_is_the_draw_of_a_run(model: Path, tmp_path: Path) -> None:
    for name in ("easy", "hard"):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"prompt": name}))
    (tmp_path / "mine.py").write_text("def weights(step):\n    return [1 - step, step]\n\nvalue = 3\n")
    sources = [str(tmp_path / f"{name}.jsonl") for name in ("easy", "hard")]
    task = {"prompts": sources, "curriculum": f"{tmp_path}/mine.py:weights", "prompts_per_step": 2}
    found, _ = questions(config(task=task), model, tmp_path, None)
    assert isinstance(found.training, CurriculumDraw)
    assert [found.training(group).prompt for group in range(4)] == ["easy", "easy", "hard", "hard"]
    with pytest.raises(TaskError, match=r"mine\.py:value is no function"):
        questions(config(task={**task, "curriculum": f"{tmp_path}/mine.py:value"}), model, tmp_path, None)


@pytest.mark.parametrize(("epochs", "per_step", "steps"), [(1, 4, 1), (3, 4, 3), (3, 5, 3), (1, 100, 1), (None, 4, 7)])
def test_epochs_are_steps(epochs: int | None, per_step: int, steps: int) -> None:
    settings = config(task={"epochs": epochs, "prompts_per_step": per_step}, steps=7)
    assert with_steps_of_epochs(settings, ROWS).steps == steps


def test_a_run_has_the_steps_of_its_epochs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def check(request: RunRequest) -> Any:
        seen.append(request.config.steps)
        raise TaskError("seen")

    monkeypatch.setattr(run_setup, "_check", check)
    request = RunRequest(config(task={"epochs": 5, "prompts_per_step": 2}), tmp_path, None, "again", prompts=ROWS)
    with pytest.raises(TaskError, match="seen"):
        asyncio.run(run_setup.run(request))
    assert seen == [10]


TURNS = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
REFUSED = {
    "roles": "{% for m in messages %}{{ m.content if m.role != 'tool' else raise_exception('no tools') }}{% endfor %}",
    "left out": TURNS.replace("in messages", "in messages if m.role != 'tool'"),
    "counted": TURNS.replace("{{ m.role }}", "{{ loop.index }}"),
    "no answers": TURNS.replace("in messages", "in messages if m.role != 'assistant'"),
    "other contents": TURNS.replace("m.content", "m.contents"),
}


def problems(settings: Config, folder: Path) -> list[Problem]:
    return list(turn_problems(settings, lambda: prompt_tokenizer(settings, folder).render_chat))


@pytest.mark.parametrize("template", list(REFUSED.values()), ids=list(REFUSED))
def test_conversations_that_a_template_cannot_go_on_with_are_refused_before_workers_start(
    template: str, model: Path, tmp_path: Path
) -> None:
    """`asyncrl doctor` and a run say the same of them, with what to do."""
    (tmp_path / "tools.py").write_text("def add(a: int) -> int:\n    return a\n")
    tokenizer = build_tokenizer(())
    tokenizer.chat_template = template
    tokenizer.save_pretrained(tmp_path)
    rows = [{"prompt": [{"role": "user", "content": "hi"}]}]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tools = {"use": "tools", "options": {"tools": [f"{tmp_path}/tools.py:add"]}}
    chosen = config(task={"prompts": str(tmp_path / "p.jsonl")}, environment=tools)
    (problem,) = problems(chosen, tmp_path)
    says = "an environment cannot answer in the role 'tool'"
    assert problem.key == "environment.use"
    assert says in str(problem)
    assert 'write environment.options.role = "user"' in str(problem)
    with pytest.raises(ConfigError, match=says):
        questions(chosen, tmp_path, tmp_path, rows)
    assert problems(chosen, model) == [], "a template that shows all"
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a text"}))
    assert problems(chosen, tmp_path) == [], "texts have no template"


LOST = [
    {"prompt": "drei und zwei?", "answer": "fünf"},
    {"prompt": [{"role": "user", "content": "größer\nals 4?"}], "answer": 5},
]


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    build_tokenizer(("und ",)).save_pretrained(tmp_path)
    return tmp_path


def test_characters_without_a_token_are_named_with_the_first_row(tiny: Path) -> None:
    many = [{"prompt": "".join(map(chr, range(0x4E00, 0x4E20)))}]
    for rows in (LOST, many):
        (said,) = lost_characters(tiny, {"task.prompts": load_prompts(rows)})
        golden.says(said)
    build_tokenizer(tuple("\nößü")).save_pretrained(tiny)
    assert list(lost_characters(tiny, {"task.prompts": load_prompts(LOST)})) == []


def test_a_tokenizer_of_bytes_loses_nothing(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert list(lost_characters(tmp_path, {"task.prompts": load_prompts(LOST)})) == []
    assert list(lost_characters(tmp_path / "none", {"task.prompts": load_prompts(LOST)})) == []


def test_a_run_says_what_is_lost_and_that_a_tiny_model_has_no_roles(tiny: Path) -> None:
    settings = config(model={"name": "warmed:reverse"}, task={"system": "Antworte."})
    said = list[str]()
    sets = PromptSets(load_prompts(LOST, system="Antworte."), {})
    questions_of(settings, sets, tiny, tiny / "longest", {}, said.append)
    golden.says("\n".join(said))
