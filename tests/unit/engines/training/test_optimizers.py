"""Every optimizer of torch trains by its name, with its options checked as torch would check them."""

import inspect
import io
from pathlib import Path
from typing import Any

import pytest
import torch

from asyncrl.config.schema import TrainingConfig
from asyncrl.config.sections.training_config import (
    OPTIMIZERS,
    OTHER_KEYS,
    UNSUPPORTED,
    UNSUPPORTED_OPTIONS,
    kept_numbers,
    option_mistakes,
)
from asyncrl.config.sources import load
from asyncrl.engines.ranks.rank_mesh import RankMesh
from asyncrl.engines.training.optimizer import Optimizer, OtherWeights
from asyncrl.engines.training.policy_trainer import PolicyTrainer
from asyncrl.engines.training.trainer_checkpoint import read_state
from asyncrl.errors import ConfigError
from asyncrl.lanes.weights.slot_memory import Role
from tests.unit.engines.training.tiny_training import make_config, make_rows, same, step, weights

OF_TORCH = [name for name, kind in OPTIMIZERS.items() if kind.module == "torch.optim"]
NONE: dict[str, Any] = {}
GOOD: dict[str, Any] = {
    **dict.fromkeys(("eps", "momentum_decay", "lr_decay", "initial_accumulator_value"), 1e-4),
    **dict.fromkeys(("amsgrad", "nesterov", "centered", "decoupled_weight_decay"), True),
    **dict.fromkeys(("momentum", "alpha", "rho"), 0.9),
    "dampening": 0.0,
    "lambd": 1e-4,
    "t0": 1e6,
    "beta2_decay": -0.7,
    "d": 1.5,
    "adjust_lr_fn": "original",
    "ns_steps": 3,
    "ns_coefficients": [3.4, -4.7, 2.0],
    "etas": [0.4, 1.3],
    "step_sizes": [1e-6, 50],
}
BAD: dict[str, Any] = {
    **dict.fromkeys(("eps", "momentum_decay", "lr_decay", "initial_accumulator_value", "momentum", "alpha"), -0.1),
    "rho": 1.5,
    "beta2_decay": 0.5,
    "d": 0.5,
    "adjust_lr_fn": "mine",
    "etas": [1.2, 0.5],
}


def good(name: str) -> dict[str, Any]:
    options = {key: GOOD[key] for key in OPTIMIZERS[name].options}
    return options | {"eps": [1e-30, 1e-3]} if name == "adafactor" else options


def settings(name: str, **options: Any) -> TrainingConfig:
    return TrainingConfig(optimizer=name, optimizer_options=options, learning_rate=1e-2)


class Model(torch.nn.Module):
    """A matrix inside, embeddings and biases outside."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(5, 4)
        self.inner = torch.nn.Linear(4, 4)
        self.lm_head = torch.nn.Linear(4, 5)

    def get_input_embeddings(self) -> torch.nn.Module:
        return self.embed

    def loss(self) -> torch.Tensor:
        return self.lm_head(self.inner(self.embed.weight)).log_softmax(-1).diagonal().mean().neg()


def trained(name: str, steps: int = 3, model: Model | None = None, **options: Any) -> tuple[Model, Optimizer]:
    model = model or Model()
    optimizer = Optimizer(model, settings(name, **options), steps)
    for _ in range(steps):
        model.loss().backward()
        assert optimizer.step(RankMesh(), finite=True) is not None
    return model, optimizer


def test_the_table_names_every_optimizer_of_torch() -> None:
    found = {name.lower() for name in torch.optim.__all__ if inspect.isclass(getattr(torch.optim, name))}
    found &= {name.lower() for name, each in vars(torch.optim).items() if inspect.isclass(each)}
    assert found - {"optimizer"} == set(OF_TORCH) | set(UNSUPPORTED)


@pytest.mark.parametrize("name", OF_TORCH)
def test_every_optimizer_lowers_a_loss(name: str) -> None:
    model, _ = trained(name, steps=20)
    assert model.loss() < Model().loss() - 1e-4
    model, _ = trained(name, **good(name))
    assert model.loss() != Model().loss()


@pytest.mark.parametrize("name", OF_TORCH)
def test_options_are_those_of_torch(name: str) -> None:
    known = set(inspect.signature(getattr(torch.optim, OPTIMIZERS[name].name)).parameters) - {"params"}
    others = {key for key, is_read in (("betas", OPTIMIZERS[name].betas), ("lr", True)) if is_read}
    others |= {"weight_decay"} if OPTIMIZERS[name].weight_decay else set()
    assert known - set(UNSUPPORTED_OPTIONS) == set(OPTIMIZERS[name].options) | others
    assert others <= set(OTHER_KEYS)
    assert not option_mistakes(name, good(name))


@pytest.mark.parametrize(
    ("name", "key"), [(n, k) for n in OF_TORCH for k in OPTIMIZERS[n].options if k in BAD if n != "asgd"]
)
def test_what_torch_would_refuse_is_refused_before(name: str, key: str) -> None:
    value = [-1.0, 1e-3] if (name, key) == ("adafactor", "eps") else BAD[key]
    (mistake,) = option_mistakes(name, {key: value})
    assert mistake.startswith(f"{key} must be ")
    if (name, key) != ("muon", "eps"):
        with pytest.raises(ValueError, match=r"\S"):
            Optimizer(Model(), settings(name, **{key: value}), 1)


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ({"optimizer": "lbfgs"}, "lbfgs is not supported: it computes the loss several times"),
        ({"optimizer": "sparse_adam"}, "sparseadam is not supported: it takes sparse gradients"),
        ({"optimizer": "rmsprob"}, "did you mean rmsprop?"),
        ({"optimizer_options": {"momentum": 0.9}}, "adamw has no option momentum; it has eps, amsgrad"),
        ({"optimizer": "sgd", "optimizer_options": {"lr": 1.0}}, "write training.learning_rate instead of lr"),
        ({"optimizer": "sgd", "optimizer_options": {"foreach": True}}, "foreach is not supported"),
        ({"optimizer": "muon", "layout": {"shard": 2}}, "muon is not supported with training.layout.shard"),
        ({"optimizer": "muon", "layout": {"tp": 2}}, "muon is not supported with training.layout.tp"),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": True}}, "nesterov needs a momentum over 0"),
    ],
)
def test_a_mistake_is_answered_by_its_key(written: dict[str, Any], answer: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load("quickstart", values={"training": written}, environ=NONE)
    assert answer in str(refused.value)
    assert "training.optimizer" in str(refused.value)


def test_names_are_read_however_they_are_spelled() -> None:
    assert [settings(name).optimizer for name in ("AdamW", "NAdam", "adamw_8bit")] == ["adamw", "nadam", "adamw8bit"]


def test_what_an_optimizer_does_not_read_is_said() -> None:
    chosen = load("quickstart", values={"training": {"optimizer": "rprop", "weight_decay": 0.1, "betas": [0.5, 0.9]}})
    found = [str(problem) for problem in chosen.config.warnings]
    assert [key for key in ("weight_decay", "betas") if any(f"training.{key}" in text for text in found)] == [
        "weight_decay",
        "betas",
    ]


@pytest.mark.parametrize("name", OF_TORCH)
def test_a_state_goes_on_bit_for_bit_and_only_with_its_optimizer(name: str) -> None:
    model, optimizer = trained(name)
    again = Model()
    again.load_state_dict(model.state_dict())
    restored = Optimizer(again, settings(name), 3)
    torch.save(optimizer.saved(optimizer.states()), file := io.BytesIO())
    file.seek(0)
    restored.load(torch.load(file, weights_only=True))
    assert restored.updates == 3
    for each, of in ((model, optimizer), (again, restored)):
        each.loss().backward()
        of.step(RankMesh(), finite=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    other = "sgd" if name != "sgd" else "adam"
    with pytest.raises(ConfigError, match=f"holds the state of {name}"):
        Optimizer(Model(), settings(other), 3).load(optimizer.saved(optimizer.states()))


def of_an_earlier_version(name: str, monkeypatch: pytest.MonkeyPatch, **roles: Any) -> dict[str, Any]:
    """Returns the state of an optimizer that told roles of weights in another way."""
    with monkeypatch.context() as then:
        for key, value in roles.items():
            then.setattr(f"asyncrl.engines.training.optimizer.{key}", value)
        _, optimizer = trained(name)
        return optimizer.saved(optimizer.states())


EVERY = frozenset(Role)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_state_of_other_groups_of_weights_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = of_an_earlier_version(name, monkeypatch, MATRICES=EVERY)
    with pytest.raises(
        OtherWeights, match=r"^5 weights with decay and 0 without, and this version has 3 .* and 2 with"
    ):
        Optimizer(Model(), settings(name), 3).load(saved)


@pytest.mark.parametrize(
    ("roles", "counts"),
    [
        ({"MATRICES": EVERY}, "1 weights with decay and 0 without and 4 weights with decay and 0 without"),
        ({"INNER": EVERY}, "3 weights with decay and 0 without and 0 weights with decay and 2 without"),
        ({"INNER": frozenset()}, "0 weights with decay and 0 without and 3 weights with decay and 2 without"),
    ],
)
def test_a_state_of_muon_is_of_matrices_and_others(
    roles: dict[str, Any], counts: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = of_an_earlier_version("muon", monkeypatch, **roles)
    with pytest.raises(OtherWeights, match=rf"^{counts}, and this version has 1 weights"):
        Optimizer(Model(), settings("muon"), 3).load(saved)


def test_moments_of_another_shape_are_refused_with_the_weight() -> None:
    _, optimizer = trained("adamw")
    saved = optimizer.saved(optimizer.states())
    of_weights = saved["states"][0]["state"]
    of_weights[0], of_weights[1] = of_weights[1], of_weights[0]
    with pytest.raises(OtherWeights, match=r"the first that differ are moments \(4, 4\) for embed\.weight \(5, 4\)"):
        Optimizer(Model(), settings("adamw"), 3).load(saved)


@pytest.mark.parametrize(
    ("place", "more", "files", "advice"),
    [
        ("4", {}, (), "from its weights: `asyncrl export {run} MODEL --step 4`, then `asyncrl run {run}/config.toml "),
        ("4", {}, ("model/adapter_config.json",), "`asyncrl export {run} MODEL --step 4 --merge`, then `asyncrl run"),
        (
            "4/critic",
            {},
            (),
            "`asyncrl export {run} MODEL --step 4`, then `asyncrl run {run}/config.toml --run-dir NEW",
        ),
        ("4", {"modules": {}}, (), "start anew: `asyncrl run {run}/config.toml --run-dir NEW`"),
    ],
)
def test_a_checkpoint_of_another_version_is_named_with_the_commands_that_start_anew(
    place: str,
    more: dict[str, Any],
    files: tuple[str, ...],
    advice: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("asyncrl.engines.training.trainer_checkpoint.program", lambda: "asyncrl")
    saved = of_an_earlier_version("adamw", monkeypatch, MATRICES=EVERY)
    directory = tmp_path / "checkpoints" / place
    for file in (*files, "trainer.pt"):
        (directory / file).parent.mkdir(parents=True, exist_ok=True)
        (directory / file).write_text("{}")
    torch.save({"optimizer": saved, "rng": torch.get_rng_state(), **more}, directory / "trainer.pt")
    with pytest.raises(ConfigError) as refused:
        read_state(directory, Optimizer(Model(), settings("adamw"), 3), RankMesh())
    assert str(refused.value).startswith(f"the optimizer's state in checkpoint {directory} was written by another vers")
    assert advice.format(run=tmp_path) in str(refused.value)
    assert "the first that differ are moments (4,) for lm_head.weight (5, 4)" in str(refused.value)


def test_plain_values_of_a_state_go_on_too() -> None:
    _, optimizer = trained("adamw")
    states = optimizer.states()
    states[0]["state"][0]["step_as_number"] = 3
    restored = Optimizer(Model(), settings("adamw"), 3)
    restored.load(optimizer.saved(states))
    assert restored.states()[0]["state"][0]["step_as_number"] == 3


@pytest.mark.parametrize("options", [NONE, {"amsgrad": True}, {"momentum": 0.9}, {"momentum": 0.9, "centered": True}])
def test_the_memory_of_a_state_is_what_is_counted(options: dict[str, Any]) -> None:
    for name in OF_TORCH:
        if not option_mistakes(name, options) and name != "adafactor":
            _, optimizer = trained(name, **options)
            parts = [tensor for part in optimizer.parts for each in part.state.values() for tensor in each.values()]
            found = sum(each.numel() for each in parts if isinstance(each, torch.Tensor) and each.numel() > 1)
            matrices = sum(p.numel() for p in optimizer.parts[0].param_groups[0]["params"])
            counted = sum(p.numel() for p in optimizer.parameters)
            expected = matrices + 2 * (counted - matrices) if name == "muon" else kept_numbers(name, options) * counted
            assert found == expected, name


def test_muon_updates_the_matrices_inside_of_layers() -> None:
    model, optimizer = trained("muon")
    inner = [each for group in optimizer.parts[0].param_groups for each in group["params"]]
    assert [each is model.inner.weight for each in inner] == [True]


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_a_policy_resumes_with_its_optimizer(name: str, tiny: Path, tmp_path: Path) -> None:
    config = make_config(training={"optimizer": name})
    trainer = PolicyTrainer(config, tiny)
    before = weights(trainer)
    step(trainer, make_rows())
    assert not torch.equal(*(each["model.layers.0.mlp.up_proj.weight"] for each in (before, weights(trainer))))
    trainer.save(tmp_path, {})
    resumed, _ = PolicyTrainer.resume(config, tmp_path)
    for each in (trainer, resumed):
        step(each, make_rows(seed=1))
    assert same(weights(trainer), weights(resumed))
    with pytest.raises(ConfigError, match=f"holds the state of {name}"):
        PolicyTrainer.resume(make_config(), tmp_path)
