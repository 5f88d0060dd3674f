"""Runs that never begin: one message, exit code 2, and no directory that was not there before. Mistakes that one sees
without a model of its own are in tests/unit/deploy/test_mistakes.py."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification

from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer

sys.path.insert(0, str(Path(__file__).parent))
from programs import finished
from watching import PATIENCE

pytestmark = [pytest.mark.fleet, pytest.mark.usefixtures("programs")]


TALK = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "<think>so</think>hello"},
    {"role": "user", "content": "and"},
]
TEMPLATES = {
    "forgets": "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }};{% endfor %}",
    "fails": "{{ raise_exception('only one message, please') }}",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An experiment that would run: a model of random weights whose tokens are characters, prompts and a reward."""
    folder = tmp_path_factory.mktemp("refusals")
    tokenizer = build_tokenizer(())
    build_model(tokenizer).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    shutil.copytree(folder / "model", folder / "bare", ignore=shutil.ignore_patterns("tokenizer*", "chat_template*"))
    AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=2).save_pretrained(folder / "two")
    tokenizer.save_pretrained(folder / "two")
    shutil.copytree(folder / "model", folder / "plain", ignore=shutil.ignore_patterns("chat_template*"))
    for name, template in TEMPLATES.items():
        tokenizer.chat_template = template
        shutil.copytree(folder / "model", folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "talk.jsonl").write_text(json.dumps({"prompt": TALK, "answer": "a"}))
    (folder / "wide.jsonl").write_text(json.dumps({"prompt": "x" * 200, "answer": "a"}))
    (folder / "short.jsonl").write_text(json.dumps({"prompt": "abc", "answer": "a"}))
    (folder / "long.jsonl").write_text(
        "\n".join(json.dumps({"prompt": "x" * length, "answer": "a"}) for length in (5, 600, 7))
    )
    (folder / "mine.py").write_text("import missing_module\n\ndef right(sample):\n    return 1.0\n")
    (folder / "mine.toml").write_text(
        '[model]\nname = "model"\n[task]\nprompts = "short.jsonl"\n[reward]\nfunctions = ["exact_match"]\n'
    )
    return folder


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--task.prompts", "long.jsonl"], "long.jsonl, line 2: the prompt has 600 tokens"),
        (["--task.prompts", "shrot.jsonl"], "did you mean short.jsonl?"),
        (
            ["--model.name", "plain", "--task.system", "Be kind."],
            "short.jsonl, line 1: the prompt is a list of messages and the model's tokenizer",
        ),
        (
            ["--task.prompts", "wide.jsonl"],
            "line 1: the prompt has 200 tokens, and with generation.max_new_tokens = 64",
        ),
        (["--model.name", "forgets", "--task.prompts", "talk.jsonl"], "changes a part of message 2 (assistant)"),
        (
            ["--model.name", "fails", "--task.prompts", "talk.jsonl"],
            "talk.jsonl, line 1: the model's chat template fails",
        ),
        (["--reward.functions", "mine.py:right"], "missing_module"),
        (["--model.name", "model", "--reward.model", "two"], "reward.model: the head of FOLDER/two has 2 labels"),
        (["--model.name", "model", "--reward.model", "model"], "reward.model: FOLDER/model has no head that scores"),
        (
            ["--algorithm.preset", "ppo", "--model.name", "model", "--critic.model", "bare"],
            "critic.model: there is no tokenizer in FOLDER/bare",
        ),
        (["--model.name", "model", "--generation.slots", "100000000"], "lower generation.slots, which is 100000000"),
        (["--run-dir", "new/deep", "--model.name", "./nowhere"], "there is no folder FOLDER/nowhere"),
    ],
)
def test_refused_run_leaves_no_files(flags: list[str], says: str, folder: Path) -> None:
    before = sorted(folder.iterdir())
    command = [sys.executable, "-m", "asyncrl.deploy.cli", "run", "mine.toml", *flags]
    done = finished(command, cwd=folder, timeout=PATIENCE)
    assert done.returncode == 2, done.stderr
    assert says.replace("FOLDER", str(folder)) in done.stderr
    assert "run directory" not in done.stdout
    assert [path for path in sorted(folder.iterdir()) if path.name != "__pycache__"] == before
