"""What tokenizer, template, configs and weights of a model folder say about ids, first and last tokens, and heads."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from asyncrl.config.problems import Problem
from asyncrl.config.schema import Config
from asyncrl.deploy.checks.model_checks import adapter_problems, cache_problems, content_problems, layers_of
from asyncrl.deploy.checks.run_prompts import PromptSets, refuse_marks
from asyncrl.deploy.preflight import preflight
from asyncrl.engines.generation.block_pool import KV_BLOCK, blocks_for
from asyncrl.engines.generation.tokenization import TokenizerWithStops, end_ids, write_ends
from asyncrl.engines.generation.torch_engine import TorchEngine
from asyncrl.engines.models.lora import adapted, attach
from asyncrl.engines.models.model_folder import longest_row
from asyncrl.engines.models.model_loading import load_pretrained
from asyncrl.engines.models.model_shape import PACKAGED
from asyncrl.engines.models.warmed_up_model import build_model, build_tokenizer
from asyncrl.errors import ConfigError, TaskError
from asyncrl.tasks.prompt_sources import training_prompts
from tests import golden
from tests.unit.engines.generation.conftest import model_folder as model_folder

SPECIAL = ("<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<end_of_turn>", "<|end|>", "[INST]")
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
)
PHI = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}<|endoftext|>"
GLM = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
REFUSING = "{{ raise_exception('no assistant here') }}"


def tokenizer(
    template: str | None = None,
    eos: str | None = "</s>",
    bos: str | None = "<s>",
    around: Any = None,
    more: Sequence[str] = (),
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer of bytes with the tokens SPECIAL, then `more`. around: what it writes around texts."""
    vocabulary = {text: at for at, text in enumerate((*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())))}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(list(SPECIAL))
    plain.add_special_tokens(list(more))
    if around is not None:
        plain.post_processor = around
    made = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", bos_token=bos, eos_token=eos)
    made.chat_template = template
    return made


def written(folder: Path, made: PreTrainedTokenizerFast, eos: int | list[int] | None = 2, **shape: Any) -> Path:
    """Writes a model of a thousand weights with this tokenizer."""
    torch.manual_seed(0)
    size = {"vocab_size": len(made), "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "max_position_embeddings": 64, "bos_token_id": 1, "pad_token_id": 0}
    LlamaForCausalLM(LlamaConfig(**size | heads | {"eos_token_id": eos} | shape)).save_pretrained(folder)
    made.save_pretrained(folder)
    return folder


def found(folder: Path, **settings: Any) -> tuple[list[str], list[str]]:
    """Returns errors and warnings."""
    problems = list(content_problems(folder, **settings))
    return [p.text for p in problems if not p.is_warning], [p.text for p in problems if p.is_warning]


def ends_of(folder: Path) -> list[int]:
    """Returns the ids at which generation ends an answer."""
    described = json.loads((folder / "generation_config.json").read_text())
    config = SimpleNamespace(eos_token_id=described.get("eos_token_id"))
    return [int(each) for each in end_ids(config, AutoTokenizer.from_pretrained(folder))]


@pytest.mark.parametrize(
    ("template", "end", "eos"),
    [(CHATML, "<|im_end|>", 2), (GEMMA, "<end_of_turn>", [2]), (PHI, "<|end|>", [2, 5]), (CHATML, "<|im_end|>", None)],
    ids=["ChatML", "gemma", "phi, whose last turn has two", "ChatML, without another end"],
)
def test_an_answer_ends_where_the_template_closes_it(tmp_path: Path, template: str, end: str, eos: Any) -> None:
    folder = written(tmp_path, tokenizer(template, eos="</s>" if eos else None), eos)
    number = SPECIAL.index(end)
    ends = [*(eos if isinstance(eos, list) else [eos] if eos else []), number]
    errors, (warning,) = found(folder)
    assert not errors
    golden.says(warning, end, str(sorted(ends)))
    assert ends_of(folder) == sorted(ends)
    described = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(described | {"eos_token_id": sorted(ends)}))
    assert found(folder) == ([], []), "the line that it names mends it"
    assert ends_of(folder) == sorted(ends)


@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (MISTRAL, "</s>"),
        (GLM, "</s>"),
        (REFUSING, "</s>"),
        (None, "<|endoftext|>"),
        (CHATML, "<|im_end|>"),
        ("{{ 0 }}", "</s>"),
    ],
    ids=["Mistral", "GLM, which closes nothing", "refusing", "gpt2, without a template", "Qwen", "shows no answer"],
)
def test_ends_that_are_named_are_no_news(tmp_path: Path, template: str | None, eos: str) -> None:
    folder = written(tmp_path, tokenizer(template, eos, bos=None if template is None else "<s>"), SPECIAL.index(eos))
    assert found(folder) == ([], [])
    assert ends_of(folder) == [SPECIAL.index(eos)]


@pytest.mark.parametrize(
    ("template", "eos", "eos_token", "is_described"),
    [
        (CHATML, 2, "</s>", True),
        (CHATML, None, "</s>", False),
        (CHATML, [2, 4], "</s>", False),
        (GEMMA, [2], "<|endoftext|>", True),
        (PHI, [2, 5], "</s>", False),
        (MISTRAL, 5, "</s>", True),
        (None, 2, "</s>", False),
        (CHATML, None, None, True),
    ],
)
def test_an_export_names_each_token_at_which_the_run_ended_answers(
    tmp_path: Path, template: str | None, eos: Any, eos_token: str | None, is_described: bool
) -> None:
    folder = written(tmp_path, tokenizer(template, eos=eos_token), eos)
    path = folder / "generation_config.json"
    ends = ends_of(folder)
    if is_described:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.6}))
        path.chmod(0o400)
    else:
        path.unlink()
    write_ends(folder)
    named = GenerationConfig.from_pretrained(folder) if path.exists() else LlamaConfig.from_pretrained(folder)
    assert sorted({*(named.eos_token_id if isinstance(named.eos_token_id, list) else [named.eos_token_id])}) == ends
    assert named.pad_token_id == 0
    assert not is_described or json.loads(path.read_text())["temperature"] == 0.6
    assert found(folder)[1] == []


def test_a_folder_without_any_end_is_told(tmp_path: Path) -> None:
    folder = written(tmp_path, tokenizer(eos=None), None)
    errors, (warning,) = found(folder)
    assert not errors
    assert "names no end of an answer" in warning
    assert found(folder, stop=("\n",)) == ([], [])
    (folder / "generation_config.json").write_text('{"eos_token_id": 9999}')
    assert "names no end" in found(folder)[1][0], "an id that the model does not have ends nothing"
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"eos_token_id": 2}))
    assert found(folder) == ([], [])


BEYOND = "<|tool|>"


@pytest.mark.parametrize(
    ("template", "bos", "around", "weights"),
    [
        (CHATML.replace("<|im_start|>", BEYOND), "<s>", None, "safetensors"),
        (CHATML.replace("<|im_start|>", BEYOND), "<s>", None, "bin"),
        ("{% if tools %}" + BEYOND + "{% endif %}" + CHATML, "<s>", None, "safetensors"),
        ("{{ '<|' ~ 'tool' ~ '|>' }}" + CHATML, "<s>", None, "safetensors"),
        ("{{ bos_token }}" + CHATML, BEYOND, None, "safetensors"),
        (None, BEYOND, f"{BEYOND} $A", "bin"),
    ],
    ids=["literally", "without headers", "where tools are", "put together", "as the first token", "by the tokenizer"],
)
def test_a_token_beyond_the_embedding_is_refused_where_it_is_written(
    tmp_path: Path, template: str | None, bos: str, around: str | None, weights: str
) -> None:
    made = tokenizer(template, bos=bos, more=[BEYOND])
    number = made.convert_tokens_to_ids(BEYOND)
    if around is not None:
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(around, special_tokens=[(BEYOND, number)])
    folder = written(tmp_path, made, [2, 4], vocab_size=number)
    if weights == "bin":
        torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
        (folder / "model.safetensors").unlink()
    (error,), _ = found(folder)
    golden.says(error, BEYOND)


@pytest.mark.parametrize("more", [0, 1, 50])
def test_padded_embeddings_and_tokens_that_nothing_writes_pass(tmp_path: Path, more: int) -> None:
    made = tokenizer(CHATML, more=[BEYOND])
    assert found(written(tmp_path, made, 4, vocab_size=len(made) - 1 + more)) == ([], [])


def config(folder: Path, rows: list[dict[str, Any]]) -> tuple[Config, PromptSets]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    chosen = Config.model_validate({"model": {"name": str(folder)}, "task": {"prompts": str(file)}})
    return chosen, PromptSets(training_prompts(chosen), {})


@pytest.mark.parametrize("prompt", [f"say {BEYOND}", [{"role": "user", "content": f"say {BEYOND}"}]])
def test_a_row_with_a_token_beyond_the_embedding_is_named(tmp_path: Path, prompt: Any) -> None:
    made = tokenizer(CHATML, more=[BEYOND])
    folder = written(tmp_path, made, 4, vocab_size=len(made) - 1)
    chosen, sets = config(folder, [{"prompt": prompt if at == 1500 else "hi"} for at in range(1600)])
    with pytest.raises(TaskError, match=r"^task\.prompts: .*line 1501 holds <\|tool\|> \(id \d+\), for which"):
        refuse_marks(chosen, sets.by_key(chosen), folder)


ENDINGS = {
    "template": processors.TemplateProcessing("<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]),
    "only the end": processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)]),
    "in a sequence": processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])]
    ),
    "roberta": processors.RobertaProcessing(("</s>", 2), ("<s>", 1)),
    "bert": processors.BertProcessing(("</s>", 2), ("<s>", 1)),
}


@pytest.mark.parametrize("around", ENDINGS.values(), ids=ENDINGS)
def test_a_tokenizer_that_ends_texts_is_refused_for_texts_alone(tmp_path: Path, around: Any) -> None:
    folder = written(tmp_path, tokenizer(CHATML, around=around), [2, 4])
    chosen, sets = config(folder, [{"prompt": "hi"}])
    with pytest.raises(TaskError, match=r"^task\.prompts: .*rows\.jsonl, line 1: .*writes </s> behind.*add_eos_token"):
        refuse_marks(chosen, sets.by_key(chosen), folder)
    with pytest.raises(TaskError, match="writes </s> behind each text"):
        TokenizerWithStops(AutoTokenizer.from_pretrained(folder), ()).prompt_ids("hi")
    chosen, sets = config(folder, [{"prompt": [{"role": "user", "content": "hi"}]}])
    refuse_marks(chosen, sets.by_key(chosen), folder)


BEGINNING = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
TWO = processors.TemplateProcessing("[INST] <s> $A", special_tokens=[("<s>", 1), ("[INST]", 8)])


@pytest.mark.parametrize(
    ("around", "prompt", "first"),
    [
        (None, "hi", []),
        (None, "<s>hi", [1]),
        (BEGINNING, "hi", [1]),
        (BEGINNING, "<s>hi", [1]),
        (BEGINNING, "<s><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", [1]),
        (BEGINNING, "", [1]),
        (BEGINNING, "<s>", [1]),
        (TWO, "hi", [8, 1]),
        (TWO, "[INST]<s>hi", [8, 1]),
    ],
)
def test_first_tokens_are_written_once(around: Any, prompt: str, first: list[int]) -> None:
    made = tokenizer(around=around)
    ids = TokenizerWithStops(made, ()).prompt_ids(prompt).tolist()
    text = prompt.removeprefix("[INST]").removeprefix("<s>")
    assert ids == [*first, *made(text, add_special_tokens=False)["input_ids"]]


@pytest.mark.parametrize("sharded", [False, True])
def test_tied_weights_that_differ_are_refused(tmp_path: Path, sharded: bool) -> None:
    folder = written(tmp_path, tokenizer(), tie_word_embeddings=False)
    assert found(folder) == ([], [])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    tensors = load_file(folder / "model.safetensors")

    def save(head: torch.Tensor) -> None:
        whole = tensors | {"lm_head.weight": head.clone()}
        if not sharded:
            save_file(whole, folder / "model.safetensors")
            return
        (folder / "model.safetensors").unlink(missing_ok=True)
        files = {name: f"model-0000{1 + (name == 'lm_head.weight')}-of-00002.safetensors" for name in whole}
        for file in set(files.values()):
            save_file({name: each for name, each in whole.items() if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))

    embedding = tensors["model.embed_tokens.weight"]
    save(tensors["lm_head.weight"])
    (error,), _ = found(folder)
    golden.says(error, "tie_word_embeddings")
    one = embedding.clone()
    one[-1, -1] += 1e-3
    save(one)
    assert "hold two different ones" in found(folder)[0][0]
    save(embedding.bfloat16())
    assert "hold two different ones" in found(folder)[0][0]
    save(embedding)
    assert found(folder) == ([], []), "the same numbers twice are harmless"
    save(one)
    (folder / "config.json").write_text(
        json.dumps({key: config[key] for key in config if key != "tie_word_embeddings"})
    )
    assert found(folder) == ([], []), "the family llama ties nothing by itself"


ModelFolder = Callable[[str], Path]


def experiment(**sections: Any) -> Config:
    task = {"prompts": "asyncrl.tasks.builtin.reverse:training", "max_prompt_tokens": 40}
    small = {"max_new_tokens": 24, **sections.pop("generation", {})}
    found = {"model": {"name": "warmed:reverse"}, "task": task, "generation": small, **sections}
    return Config.model_validate(found | {"reward": {"functions": ["exact_match"]}})


def problems(chosen: Config, section: str) -> list[Problem]:
    return [each for each in preflight(chosen) if each.key.startswith(section)]


@pytest.mark.parametrize("place", ["/proc/nothere", "{tmp}/file", "{tmp}/file/below"])
def test_a_folder_of_weights_that_cannot_be_used_is_a_problem(place: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    folder = place.format(tmp=tmp_path)
    (found,) = problems(experiment(weights={"transport": "file", "folder": folder}), "weights")
    assert (found.key, found.is_warning) == ("weights.folder", False)
    assert folder in found.text


def test_a_folder_that_can_be_made_is_none_and_is_not_made_yet(tmp_path: Path) -> None:
    assert not problems(experiment(weights={"transport": "file", "folder": str(tmp_path / "new")}), "weights")
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    ("fleet", "warned"),
    [
        ({}, True),
        ({"wire": "inproc"}, True),
        ({"wire": "tcp", "listen": "tcp://127.0.0.1:0", "joined": {"generation": 1}}, False),
    ],
)
def test_a_codec_that_the_chosen_transport_does_not_use_is_announced(fleet: dict[str, Any], warned: bool) -> None:
    found = problems(experiment(weights={"codec": "sparse"}, fleet=fleet), "weights.codec")
    assert [each.is_warning for each in found] == [True] * warned
    assert all("nothing is encoded" in each.text and 'weights.transport = "tcp"' in each.text for each in found)


@pytest.mark.parametrize("sections", [{}, {"deterministic": True, "slots": 4}])
def test_a_cache_that_the_engine_refuses_is_refused_before(
    sections: dict[str, Any], model_folder: ModelFolder, tmp_path: Path
) -> None:
    folder = model_folder("llama")
    for size, refused in ((1e-6, True), (1.0, False)):
        chosen = experiment(generation={"cache_gb": size, **sections})
        found = [*cache_problems(chosen, str(folder))]
        assert [each.key for each in found] == ["generation.cache_gb"] * refused
        if refused:
            with pytest.raises(ConfigError) as raised:
                TorchEngine(folder, chosen)
            assert str(raised.value) == f"generation.cache_gb: {found[0].text}"


def test_a_cache_of_stages_holds_a_row_in_the_layers_of_the_first_one() -> None:
    """30 layers train as 8, 8, 7 and 7, so that the first of two stages samples with 16."""
    shape = PACKAGED["pypi:smollm2"]
    found = []
    sections: dict[str, Any] = {"training": {"layout": {"pp": 4}}, "staleness": {"limit": 0}}
    for layers in (15.5, 16.5):
        generation = {"colocate": "training", "layout": {"pp": 2}}
        row = KV_BLOCK * blocks_for(longest_row(experiment(generation=generation, **sections)))
        limit = row * shape.cache_bytes_per_token * layers / shape.layers / 10**9
        chosen = experiment(generation={**generation, "cache_gb": limit}, **sections)
        found.append([each.key for each in cache_problems(chosen, "pypi:smollm2")])
    assert found == [["generation.cache_gb"], []]


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", ["all-linear"]),
        ("llama-tied", ["all-linear"]),
        ("qwen2", ["q_proj", "layers.0.mlp.up_proj"]),
        ("llama", ["q_proj", "nope"]),
        ("qwen2", ["norm"]),
    ],
)
def test_targets_that_match_nothing_are_refused_as_the_engine_does(
    family: str, targets: list[str], model_folder: ModelFolder
) -> None:
    chosen = experiment(model={"name": "m", "lora": {"rank": 2, "targets": targets}})
    assert chosen.model.lora is not None
    folder = model_folder(family)
    found = [*adapter_problems(chosen, str(folder))]
    model = load_pretrained(folder)
    if not found:
        attach(model, chosen.model.lora, seed=0)
        assert {name for name, _ in adapted(model)} <= layers_of(str(folder)).keys()
        return
    with pytest.raises(ConfigError) as raised:
        attach(model, chosen.model.lora, seed=0)
    assert str(raised.value) == f"model.lora: {found[0].text}"


def test_a_model_made_on_the_spot_has_the_layers_that_are_expected() -> None:
    chosen = experiment(model={"name": "warmed:reverse", "lora": {"rank": 97}})
    model = build_model(build_tokenizer(()))
    assert chosen.model.lora is not None
    attach(model, chosen.model.lora, seed=0)
    sizes = {name: (each.out_features, each.in_features) for name, each in adapted(model)}
    assert sizes == layers_of("warmed:reverse")


@pytest.mark.parametrize(("rank", "warned"), [(96, False), (97, True)])
def test_a_rank_that_no_layer_can_use_is_warned_about(rank: int, warned: bool) -> None:
    found = problems(experiment(model={"name": "warmed:reverse", "lora": {"rank": rank}}), "model.lora")
    assert [each.is_warning for each in found] == [True] * warned
    assert all("a rank of at most 96" in each.text for each in found)


def test_models_of_experts_are_left_to_the_run(tmp_path: Path, model_folder: ModelFolder) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for path in model_folder("llama").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    described = (folder / "config.json").read_text().replace("{", '{"num_local_experts": 4, ', 1)
    (folder / "config.json").write_text(described)
    assert layers_of(str(folder)) == {}
