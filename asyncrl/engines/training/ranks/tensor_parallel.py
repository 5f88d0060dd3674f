"""Layers that ranks with the same rows compute together, by the plan that the model itself comes with.

    colwise    a rank has some of the outputs of a linear layer: heads of attention, or inner values
    rowwise    a rank has the weights of its inputs, and the ranks sum their outputs

Embedding, norms and head are whole on every rank; their gradients have the same bits there.
"""

from fnmatch import fnmatchcase
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from asyncrl.engines.rank_limits import refusal_of_splitting
from asyncrl.engines.training.ranks.stage_weights import StageWeights
from asyncrl.errors import ConfigError

STYLES = ("colwise", "rowwise")


def split_layers(whole: Any, mesh: DeviceMesh, key: str, stage: StageWeights | None = None) -> None:
    """Splits the linear layers of a transformers model, or of a stage of it, over the ranks of a mesh. key: of the
    layout in the config. Raises ConfigError when the model has no plan, one of another kind, or heads that cannot be
    split so."""
    config = whole.config
    size = mesh.size()
    plan = getattr(config, "base_model_tp_plan", None)
    if not plan or set(plan.values()) - set(STYLES):
        others = ", ".join(sorted(set((plan or {}).values()) - set(STYLES))) or "none"
        raise ConfigError(
            f"{key}: tp splits {' and '.join(STYLES)} layers alone, and the plan of {type(whole).__name__} "
            f"has {others}; take a Llama or Qwen2 model, or shard instead of tp"
        )
    if refusal := refusal_of_splitting(config.to_dict(), size):
        raise ConfigError(f"{key}: {refusal}")
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}
    own = None if stage is None else {id(whole.get_parameter(name)) for name in stage.held}
    modules = [(name, each) for name, each in whole.base_model.named_modules() if isinstance(each, nn.Linear)]
    linear = [name for name, each in modules if own is None or id(each.weight) in own]
    found = {name: styles[plan[pattern]]() for name in linear for pattern in plan if fnmatchcase(name, pattern)}
    parallelize_module(whole.base_model, mesh, found)
