"""Users make mistakes and have bad luck: the message of the run, read as they read it, names the sample."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncrl.deploy.cli import main
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer

pytestmark = pytest.mark.fleet

Run = Callable[..., tuple[int, str]]
ENVIRONMENTS = """
import asyncio
from asyncrl import Observation

class Endless:
    async def reset(self, row, seed):
        return Observation(row["prompt"])

    async def step(self, message):
        await asyncio.Event().wait()

class Reads(Endless):
    async def reset(self, row, seed):
        return Observation(row["promt"])

class Floods(Endless):
    async def step(self, message):
        return Observation("x" * 5_000_000)
"""
TOML = """
name = "bad"
steps = 1
model.name = "model"
task = { prompts = "rows.jsonl", prompts_per_step = 1, samples_per_prompt = 2 }
generation.max_new_tokens = 4
environment = { use = "guess", max_tokens = 100, max_turns = 2, deadline = 1.0, max_bytes = 20 }
fleet.wire = "inproc"
telemetry.trace = false
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment with a model of random weights, whose tokens are characters, and rows without answers."""
    folder = tmp_path_factory.mktemp("bad-input")
    tokenizer = build_tokenizer(())
    build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.chat_template = (
        "{% for m in messages if m.role != 'tool' %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
        "{% if add_generation_prompt %}a:{% endif %}"
    )
    tokenizer.save_pretrained(folder / "model")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "abc"}))
    (folder / "chat.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "hi"}]}))
    (folder / "questions.jsonl").write_text(json.dumps({"question": "abc"}))
    (folder / "nothing.jsonl").write_text("")
    (folder / "worlds.py").write_text(ENVIRONMENTS)
    (folder / "shop.py").write_text("def price(fruit: str) -> float:\n    return 1.0\n")
    (folder / "bad.toml").write_text(TOML)
    return folder


@pytest.fixture
def run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """run(*flags) -> exit code and stderr of the command, which runs in this process: imports cost more than runs."""

    def command(*flags: str) -> tuple[int, str]:
        monkeypatch.chdir(folder)
        code = main(["run", "bad.toml", *flags, "--run-dir", str(tmp_path / "run")])
        return code, capsys.readouterr().err

    return command


JUDGE = '{use = "judge", options = {url = "http://127.0.0.1:1/v1", model = "m", tries = 1}}'
TOOLS = ("--environment.use=tools", "--environment.options.functions", '["shop.py:price"]')
MEMBER = r"on member \d of group \d: "


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--task.prompts", "questions.jsonl"], [r"questions\.jsonl, line 1: .*prompt.*question"]),
        (["--task.prompts", "nothing.jsonl"], [r"nothing\.jsonl: there are no rows"]),
        (
            ["--task.prompts", "chat.jsonl", *TOOLS],
            [
                r"environment\.use: an environment cannot answer in the role 'tool': the model's chat template "
                "leaves out messages of the role 'tool'; write environment.options.role = \"user\""
            ],
        ),
        (
            ["--environment.use=", "--reward.functions", '["exact_match"]'],
            [
                r"\.jsonl, line 1: exact_match needs the column answer: the row has no column answer; found are "
                r'prompt; write task\.columns = \{ answer = "COLUMN OF YOURS" \}'
            ],
        ),
        (
            ["--environment.use=", "--reward.functions", f"[{JUDGE}]"],
            [
                f"reward function judge {MEMBER}the judge http://127.0.0.1:1/v1/chat/completions gave no score in 1 "
                "tries; the last one: the call failed: ConnectError",
            ],
        ),
        (
            ["--environment.use=worlds.py:Reads"],
            [f"Reads {MEMBER}`reset` raised MissingColumn: the row has no column promt; .*did you mean prompt"],
        ),
        (
            ["--environment.use=worlds.py:Endless"],
            [f"Endless {MEMBER}`step` hung: no answer within 1 s\n  prompt of its row: 'abc'\nenvironment.on_error = "],
        ),
        (
            ["--environment.use=agent:true", "--environment.deadline=30"],
            [f"agent:true {MEMBER}.*exited without a request to OPENAI_BASE_URL"],
        ),
    ],
)
def test_the_message_names_what_is_wrong_and_where(flags: list[str], says: list[str], run: Run) -> None:
    code, said = run(*flags)
    assert code != 0
    assert [each for each in says if not re.search(each, said)] == [], said[-3000:]


def test_an_environment_that_never_ends_and_says_megabytes_is_limited(run: Run, tmp_path: Path) -> None:
    code, printed = run("--environment.use=worlds.py:Floods")
    assert code == 0, printed
    for line in (tmp_path / "run/samples.jsonl").read_text().splitlines():
        sample = json.loads(line)
        assert sample["finish"] == "turn_limit"
        said = [turn["content"] for turn in sample["turns"] if turn["role"] == "user"]
        assert said == ["x" * 20 + "\n[cut off after 20 bytes]"] * 2
