"""The module whose calls DeepSpeed sees: one for each pass, with the same calls below it on all ranks.

    a call             head, layers     gathered for it, in stage 3, and freed at its end
    its backward pass  head, layers     gathered again

In stage 3 each call of a module is an exchange, and DeepSpeed compares the lists of calls of all ranks. The head
computes a chunk of tokens at a time, so that ranks with more tokens would call it more often: its weights belong to
this module, and it is called in a way that DeepSpeed does not see.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from asyncrl.engines.training.ranks.shards import PassRoot

Found = TypeVar("Found")


class ZeroRoot(PassRoot):
    """Runs computations with a model. head: maps hidden states to the output of the model."""

    def __init__(self, whole: nn.Module, head: nn.Module) -> None:
        super().__init__(whole)
        for name, parameter in head.named_parameters():
            self.register_parameter(f"head_{name.replace('.', '_')}", parameter)
        self._call_head = head.forward

    def head(self, states: Tensor) -> Tensor:
        return cast(Tensor, self._call_head(states))


def run_as_one(engine: Callable[[Callable[[], Any]], Any], compute: Callable[[], Found]) -> Found:
    """Runs a computation that returns a tensor or several of one shape. The engine gets one tensor: it gathers weights
    for the backward pass of each that has a gradient, of which ranks without rows have fewer."""
    trained: list[bool] = []

    def joined() -> Tensor:
        found: Any = compute()
        if isinstance(found, Tensor):
            return found
        trained.extend(each.requires_grad for each in found)
        return torch.stack(found)

    whole = engine(joined)
    if not trained:
        return cast(Found, whole)
    parts = zip(whole.unbind(), trained, strict=True)
    return cast(Found, tuple(each if has_gradient else each.detach() for each, has_gradient in parts))
