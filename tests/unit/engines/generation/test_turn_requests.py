"""Requests of later turns: what an environment says is added to the context that it answers, as that one is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from asyncrl.engines.generation.engine_interface import Completion, SampleRequest
from asyncrl.engines.generation.tokenization import TokenizerWithStops, TurnRenderer
from asyncrl.engines.generation.torch_engine import TorchEngine, Truncation
from asyncrl.engines.generation.turn_requests import Trajectory, TurnRequests
from asyncrl.environments.transcript import context_message
from asyncrl.protocols.batch import Batch, Column, RowRef
from asyncrl.protocols.messages import PromptGroup
from asyncrl.tasks.prompt_lengths import TokenBudget
from tests.unit.engines.generation.test_sampling import plainly_truncated
from tests.unit.engines.generation.test_torch_engine import same

OPENING = [{"role": "user", "content": "hi"}]
FORMER = [{"role": "user", "content": "begin"}]


@pytest.fixture
def tokenizer(model_folder: Callable[[str], Path]) -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(model_folder("llama"))


def shown(tokenizer: PreTrainedTokenizerFast, prompt: Any, *observations: Any) -> str:
    """Returns what the policy sees before the turn after these observations; its answers are "A1", "A2" and so on.
    A text is an observation of one message; a tuple of messages and `follows` begins a context."""
    stops = TokenizerWithStops(tokenizer, ())
    requests = TurnRequests(stops, TurnRenderer(stops, np.array([3])), TokenBudget(100, 200), max_turns=9)
    group = PromptGroup(0, 0, 0, prompt, (0,), 7, 0, 1.0, 5, 9.0)
    (turn,) = requests.first(group)
    for number, said in enumerate(observations, 1):
        ids = stops.text_ids(f"A{number}")
        zeros = np.zeros(len(ids), np.int32)
        assert turn.before is not None
        done = turn.before.with_answer(
            Completion(turn.request, ids, zeros.astype(np.float32), zeros, "length", f"A{number}")
        )
        message = {"role": "user", "content": said} if isinstance(said, str) else context_message(said[0], (), said[1])
        row = done.columns() | {"transcript": transcript(done, message)}
        continued = RowRef(0, 0, 0, 0, len(done.prompt), 2, 0, 0, "", ())
        (turn,), _ = requests.later(
            group, [continued], Batch({name: Column.of([values]) for name, values in row.items()})
        )
    return stops.decode(turn.request.prompt, skip_special_tokens=False)


def transcript(done: Trajectory, message: dict[str, Any]) -> np.ndarray:
    return np.frombuffer(json.dumps([*done.transcript, message]).encode(), np.uint8)


@pytest.mark.parametrize(
    ("observations", "expected"),
    [
        (["one"], "textA1one"),
        (["one", ([{"role": "user", "content": "two"}], 1)], "textA1two"),
        (["one", ([{"role": "user", "content": "two"}], 1), "three"], "textA1twoA3three"),
        (["one", ([{"role": "user", "content": "two"}], 2), "three"], "textA1oneA2twoA3three"),
        ([(FORMER, 0), (OPENING, 1)], "textA1hi"),
        ([(FORMER, 0), (OPENING, 1), (OPENING, 3)], "textA1hiA3hi"),
    ],
)
def test_what_follows_a_prompt_that_is_text_is_text(
    tokenizer: PreTrainedTokenizerFast, observations: list[Any], expected: str
) -> None:
    assert shown(tokenizer, "text", *observations) == expected


@pytest.mark.parametrize("prompt", ["text", OPENING])
def test_what_follows_a_conversation_is_written_by_the_template(
    tokenizer: PreTrainedTokenizerFast, prompt: Any
) -> None:
    begun = "<bos>user:begin<|im_end|>assistant:A2"
    after = "<|im_end|>user:hi<|im_end|>assistant:"
    assert shown(tokenizer, prompt, (FORMER, 0), "hi") == begun + after
    assert shown(tokenizer, prompt, (FORMER, 0), "one", (OPENING, 2)) == begun + after


def test_the_tools_of_a_single_answer_reach_the_template(tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.name }} {% endfor %}{{ messages[0].content }}"
    stops = TokenizerWithStops(tokenizer, ())
    requests = TurnRequests(stops, None, TokenBudget(100, 200))
    group = PromptGroup(0, 0, 0, OPENING, (0,), 7, 0, 1.0, 5, 9.0, tools=({"name": "add"},))
    (turn,) = requests.first(group)
    assert stops.decode(turn.request.prompt) == "add hi"


# Samples of an engine under top-p, top-k and min-p.
Drain = Callable[..., dict[Any, Completion]]
MakeEngine = Callable[..., TorchEngine]
MakeRequests = Callable[..., list[SampleRequest]]
CUT = {"top_p": 0.8, "top_k": 30, "min_p": 0.02}


@pytest.mark.trap("restricted_sampling")
def test_logprobs_are_those_of_the_tokens_that_may_be_sampled(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain, model_folder: Callable[[str], Path]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(model_folder("llama"), dtype=torch.float32)
    for completion in drain(make_engine(slots=6, **CUT), requests(5, temperature=0.7, max_new_tokens=5)).values():
        prompt = completion.request.prompt
        with torch.no_grad():
            ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1, :261].tolist()
        expected = [plainly_truncated(each, 0.7, Truncation(**CUT)) for each in logits]
        found = [each[token] for each, token in zip(expected, completion.tokens.tolist(), strict=True)]
        np.testing.assert_allclose(completion.logprobs, found, atol=1e-5, rtol=0)


def test_a_truncated_sample_is_the_same_bits_beside_any_neighbours(
    make_engine: MakeEngine, requests: MakeRequests, drain: Drain
) -> None:
    wanted = requests(9, seed=3)
    together = drain(make_engine(deterministic=True, slots=6, **CUT), wanted)
    for request in wanted[:3]:
        (alone,) = drain(make_engine(deterministic=True, slots=2, **CUT), [request]).values()
        assert same(alone, together[request.key])
