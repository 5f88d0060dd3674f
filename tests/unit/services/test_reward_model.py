"""The reward service with a model, on tiny ones: scores of token ids, alone and beside functions."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    PreTrainedTokenizerFast,
)

from asyncrl.config.schema import Config
from asyncrl.engines.models.scoring_models import scoring_model_folder
from asyncrl.errors import ConfigError, RewardError
from asyncrl.protocols.batch import BatchRef
from asyncrl.services.reward_model import FeedbackWithModelService, RewardModelService
from tests.unit.services.conftest import VOCABULARY, Serve, put_row, store_read_by

ROTARY = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
FUNCTIONS = """
def tokens(sample):
    return float(sample.tokens)
"""


@pytest.fixture(scope="module")
def make_classifier(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """make_classifier(kind, **config) -> folder of a tiny model with random weights, dropout and a tokenizer."""

    def make(kind: Any = LlamaForSequenceClassification, prefix: str = "w", **changes: Any) -> Path:
        torch.manual_seed(2)
        folder = tmp_path_factory.mktemp("judge")
        sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        # The padding id is one that answers hold: comparing ids with it would find their ends in the wrong places.
        options = {"num_labels": 1, "pad_token_id": 3, "attention_dropout": 0.5, **changes}
        model = kind(LlamaConfig(vocab_size=VOCABULARY, **sizes, **options))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(5 if parameter.ndim > 1 else 1)
        model.save_pretrained(folder)
        vocabulary = {f"{prefix}{number}": number for number in range(VOCABULARY)}
        words = Tokenizer(models.WordLevel(vocabulary, unk_token=f"{prefix}0"))
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token=f"{prefix}3").save_pretrained(folder)
        return folder

    return make


@pytest.fixture(scope="module")
def judge(make_classifier: Callable[..., Path]) -> Path:
    return make_classifier()


def config(deterministic: bool = False, **sections: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"name": "tiny"},
            "task": {"prompts": "none", "samples_per_prompt": 3},
            "generation": {"deterministic": deterministic},
            "reward": {"model": "a folder", **sections.pop("reward", {})},
            "training": {"micro_batch_tokens": 60},
            **sections,
        }
    )


@pytest.fixture
def serving(serve: Serve, judge: Path) -> Serve:
    torch.set_num_threads(1)

    def made(settings: Config | None = None, model: Path = judge) -> Any:
        parts = {"options": {"model": str(model)}, "model_dir": judge}
        return serve(RewardModelService, "reward", settings or config(), **parts)

    return made


def sampled(service: RewardModelService, count: int = 9) -> BatchRef:
    """Ragged rows as generation leaves them; some end with the padding id."""
    draw = np.random.default_rng(5)
    store = store_read_by(service)
    rows = []
    for member in range(count):
        prompt = draw.integers(0, VOCABULARY, 2 + member)
        response = draw.integers(0, VOCABULARY, 14 - member)
        response[-1:] = 3 if member % 2 else response[-1]
        rows.append(put_row(store, prompt_ids=prompt, response_ids=response, text="text", group=0, member=member))
    return BatchRef(tuple(rows))


def whole(service: RewardModelService, refs: BatchRef) -> list[np.ndarray]:
    columns = ("prompt_ids", "response_ids")
    return [np.concatenate(store_read_by(service).read(ref.places[0], columns)).astype(np.int64) for ref in refs]


async def rewards(service: RewardModelService, refs: BatchRef) -> list[float | None]:
    return [score.reward for score in await service.score(refs, {"prompt": "p"})]


async def test_a_score_is_transformers_own_of_the_row_alone(serving: Serve, judge: Path) -> None:
    """Also where the row ends with what the tokenizer calls padding: the row given to transformers is one without."""
    theirs = AutoModelForSequenceClassification.from_pretrained(judge, dtype=torch.float32).eval()
    theirs.config.pad_token_id = None
    async with serving() as service:
        refs = sampled(service)
        with torch.no_grad():
            expected = [theirs(input_ids=torch.from_numpy(ids)[None]).logits.item() for ids in whole(service, refs)]
        found = await rewards(service, refs)
    assert np.std(expected) > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-5)


async def test_rows_together_equal_rows_alone(serving: Serve) -> None:
    async with serving() as service:
        refs = sampled(service)
        together = await rewards(service, refs)
        alone = [(await rewards(service, refs.take([row])))[0] for row in range(len(refs))]
    np.testing.assert_allclose(together, alone, atol=1e-5)
    async with serving(config(deterministic=True)) as service:
        refs = sampled(service)
        assert await rewards(service, refs) == [(await rewards(service, refs.take([row])))[0] for row in range(9)]


async def test_it_combines_with_functions_by_weight(serving: Serve, mine: str) -> None:
    functions = [{"use": f"{mine}:tokens", "weight": 0.5}]
    async with serving() as service:
        plain = await rewards(service, sampled(service))
    async with serving(config(reward={"functions": functions, "weight": -2.0})) as service:
        scores = await service.score(refs := sampled(service), {"prompt": "p"})
    for score, alone, ref in zip(scores, plain, refs, strict=True):
        assert score.terms == pytest.approx({"tokens": ref.tokens, "model": alone})
        assert score.reward == pytest.approx(0.5 * ref.tokens - 2.0 * alone)


@pytest.mark.parametrize(("on_error", "expected"), [("zero", 0.0), ("ignore", None)])
async def test_a_score_that_is_not_finite_is_unscorable_as_that_of_a_function(
    serving: Serve, on_error: str, expected: float | None
) -> None:
    async with serving(config(reward={"on_error": on_error})) as service:
        service._model.head.weight.fill_(float("nan"))
        (score, *_) = await service.score(sampled(service), {"prompt": "p"})
    assert score.reward == expected
    assert "reward function model on member 0 of group 0: what it returned is nan" in score.error
    async with serving() as service:
        service._model.head.weight.fill_(float("nan"))
        with pytest.raises(RewardError, match=r"(?s)is nan.*reward\.on_error"):
            await service.score(sampled(service), {"prompt": "p"})


async def test_a_token_classifier_is_read_at_the_last_token(
    serving: Serve, make_classifier: Callable[..., Path]
) -> None:
    folder = make_classifier(LlamaForTokenClassification)
    model = LlamaForTokenClassification.from_pretrained(folder)
    with torch.no_grad():
        model.score.bias.fill_(7.0)
    model.save_pretrained(folder)
    async with serving(model=folder) as service:
        refs = sampled(service)
        with torch.no_grad():
            expected = [
                model.eval()(input_ids=torch.from_numpy(i)[None]).logits[0, -1, 0] for i in whole(service, refs)
            ]
        np.testing.assert_allclose(await rewards(service, refs), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("folder", "says"),
    [
        ({"kind": LlamaForCausalLM}, r"holds no score\.weight, so its scores would be noise"),
        ({"num_labels": 2}, "another number of labels than 1"),
        ({"prefix": "v"}, r"^reward\.model: its tokenizer is not that"),
        (
            {"max_position_embeddings": 64, "rope_parameters": ROTARY},
            r"reward\.model: .*'dynamic'.* passes 64 tokens",
        ),
        ({"cut": True}, r"model\.safetensors"),
    ],
)
async def test_a_folder_that_cannot_score_is_refused(
    serving: Serve, make_classifier: Callable[..., Path], folder: dict[str, Any], says: str
) -> None:
    is_cut = folder.pop("cut", False)
    model = make_classifier(**folder)
    if is_cut:
        weights = model / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.RaisesGroup(pytest.RaisesExc(ConfigError, match=says)):
        async with serving(model=model):
            pass


# ---- a model that reads prompts and answers with a tokenizer and a chat template of its own -------------------------


TEMPLATE = "{% for m in messages %}w1 {{ m.role }} w2 {{ m.content }} {% endfor %}"
ANSWERS = ["w4", "w5 w6 w7 w9", "w8", " ".join(f"w{number}" for number in range(10, 40))]


@pytest.fixture
def reader(make_classifier: Callable[..., Path]) -> Path:
    """The folder of a reward model whose words are others than the policy's."""
    folder = make_classifier(prefix="v", max_position_embeddings=30)
    words = {name: number for number, name in enumerate(["<unk>", "user", "assistant", "system"])}
    words |= {f"w{number}": 4 + number for number in range(VOCABULARY - 4)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def reading(**sections: Any) -> Config:
    return config(reward={"reads": "text", "on_error": "ignore"}, **sections)


async def scores_of_text(serve: Serve, settings: Config, reader: Path, policy: Path, prompt: Any) -> list[float | None]:
    parts = {"options": {"model": str(reader)}, "model_dir": policy}
    async with serve(RewardModelService, "reward", settings, **parts) as service:
        store = store_read_by(service)
        ids = {"prompt_ids": [1, 2], "response_ids": [1, 2]}
        rows = [put_row(store, text=text, group=0, member=member, **ids) for member, text in enumerate(ANSWERS)]
        scored = await service.score(BatchRef(tuple(rows)), {"prompt": prompt})
    assert [score.error for score in scored[:3]] == [""] * 3
    assert " tokens, and the reward model has 30 positions" in scored[3].error
    return [score.reward for score in scored]


@pytest.mark.parametrize(
    ("prompt", "system"),
    [("w3 w9", ""), ("w3 w9", "w6"), ([{"role": "user", "content": [{"type": "text", "text": "w3 w9"}]}], "w6")],
)
async def test_scores_are_those_of_the_conversation_by_its_own_template(
    prompt: Any, system: str, reader: Path, judge: Path, serve: Serve
) -> None:
    """Also where rows of several lengths share a pass; a conversation that is too long cannot be scored."""
    theirs = AutoModelForSequenceClassification.from_pretrained(reader, dtype=torch.float32).eval()
    theirs.config.pad_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(reader)
    first = [{"role": "system", "content": system}] if system else []
    expected = []
    for text in ANSWERS[:3]:
        talk = [*first, {"role": "user", "content": "w3 w9"}, {"role": "assistant", "content": text}]
        ids = tokenizer(tokenizer.apply_chat_template(talk, tokenize=False))["input_ids"]
        with torch.no_grad():
            expected.append(theirs(input_ids=torch.tensor([ids])).logits.item())
    task = {"prompts": "none", "samples_per_prompt": 4, "system": system}
    found = await scores_of_text(serve, reading(task=task), reader, judge, prompt)
    assert np.std(expected) > 0.05
    np.testing.assert_allclose(np.array(found[:3], float), expected, atol=1e-5)
    assert found[3] is None


def test_a_model_that_reads_text_needs_no_tokenizer_of_the_policy_but_a_template(reader: Path, judge: Path) -> None:
    assert scoring_model_folder(reading(), str(reader), "reward.model", judge) == reader
    with pytest.raises(ConfigError, match=r"its tokenizer is not that of model\.name.*or let it read text"):
        scoring_model_folder(config(), str(reader), "reward.model", judge)
    with pytest.raises(ConfigError, match="there is no chat template in"):
        scoring_model_folder(reading(), str(judge), "reward.model", judge)
    with pytest.raises(ConfigError, match=r'^reward\.reads: "text" is for single answers'):
        scoring_model_folder(reading(environment={"use": "guess"}), str(reader), "reward.model", judge)


def test_a_path_without_a_folder_is_no_name_on_the_hub(judge: Path) -> None:
    for name in ("judge", "./owner/judge", "a/b/c", "/judge"):
        with pytest.raises(ConfigError, match=rf"^reward\.model: there is no folder {name}; write one"):
            scoring_model_folder(reading(), name, "reward.model", judge)


# ---- beside a person, for whom it stands in where nobody rated ------------------------------------------------------


@pytest.mark.parametrize("group", [4, -1])
async def test_the_model_stands_in_for_a_person(group: int, serve: Serve, judge: Path, tmp_path: Path) -> None:
    feedback = {"ask": "rate", "deadline": 0.01, "otherwise": "model", "weight": 2.0}
    options = {"host": "127.0.0.1", "port": 0, "key": "the-right-key", "model": str(judge)}
    parts = {"run_dir": tmp_path, "options": options, "model_dir": judge}
    async with serve(FeedbackWithModelService, "reward", config(feedback=feedback), **parts) as service:
        ref = put_row(store_read_by(service), prompt_ids=[1, 2], response_ids=[3, 4], text="text", group=group)
        (score,) = await service.score(BatchRef((ref,)), {"prompt": "p"})
    assert set(score.terms) == {"model", "person"}
    assert score.terms["person"] == pytest.approx(1 / (1 + math.exp(-score.terms["model"])))
    assert score.reward == pytest.approx(2 * score.terms["person"])
