"""The input of a model whose prompts have pictures: embeddings in which pictures stand, and positions."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncrl.engines.models.prompt_pictures import Ints, Pictures, PromptPictures

KEPT = 16
"""Prompts whose pictures stay computed between two chunks of their tokens."""


@dataclass(frozen=True, slots=True)
class PictureInput:
    """Describes the pictures of padded rows. pixels, grid: as in Pictures, of each prompt once, whichever rows show it.
    tokens: int64, indices into the flattened [rows x length] ids. sources: int64, the state of a picture that stands
    there, by its index among all. positions: int64 [3, rows, length]."""

    pixels: Tensor
    grid: Tensor
    tokens: Tensor
    sources: Tensor
    positions: Tensor

    @classmethod
    def of(
        cls, prompts: Sequence[PromptPictures | None], length: int, device: torch.device | str = "cpu"
    ) -> "PictureInput | None":
        """Describes the pictures of these rows, one prompt a row; returns None where no prompt has any."""
        unique = {each.pictures.digest: each for each in prompts if each is not None}
        if not unique:
            return None
        counts = np.array([len(each.places) for each in unique.values()])
        begins = dict(zip(unique, (counts.cumsum() - counts).tolist(), strict=True))
        indices = np.arange(length)
        positions = []
        tokens = []
        sources = []
        for row, each in enumerate(prompts):
            positions.append(np.broadcast_to(indices, (3, length)) if each is None else each.positions_at(indices))
            if each is not None:
                tokens.append(row * length + each.places)
                sources.append(begins[each.pictures.digest] + np.arange(len(each.places)))
        found = [each.pictures for each in unique.values()]
        arrays: tuple[NDArray[Any], ...] = (
            np.concatenate([each.pixels for each in found]),
            np.concatenate([each.grid for each in found]),
            np.concatenate(tokens),
            np.concatenate(sources),
            np.stack(positions, axis=1),
        )
        return cls(*(torch.from_numpy(each).to(device) for each in arrays))


def picture_layout(model: Any, ids: Tensor, pictures: PictureInput) -> dict[str, Tensor]:
    """Returns embeddings [rows, length, width] and positions of ids [rows, length], which the model gets instead.
    The encoder of pictures sees each of them once."""
    embedded: Tensor = model.get_input_embeddings()(ids)
    states = picture_states(model, pictures.pixels, pictures.grid)
    rows = embedded.flatten(0, 1).index_put((pictures.tokens,), states[pictures.sources].to(embedded.dtype))
    return {"inputs_embeds": rows.view_as(embedded), "position_ids": pictures.positions}


def picture_states(model: Any, pixels: Tensor, grid: Tensor) -> Tensor:
    """Returns the states [tokens, width] of the model's encoder of pictures."""
    found = model.base_model.get_image_features(pixels, grid, return_dict=True).pooler_output
    return torch.cat(tuple(found))


class FlatPictures:
    """Computes embeddings and positions of a flat row of tokens, as generation has it. It keeps states of pictures
    until the weights change."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._kept: OrderedDict[bytes, Tensor] = OrderedDict()

    def clear(self) -> None:
        """Forgets all states. Must be called after the values of the model's parameters changed."""
        self._kept.clear()

    def layout(self, ids: Tensor, slots: Ints, steps: Ints, prompts: Mapping[int, PromptPictures]) -> dict[str, Tensor]:
        """Returns what `picture_layout` does. ids, slots, steps: [tokens], of each token the id, its slot and its index
        in the sequence. prompts: the pictures of those slots that have any."""
        embedded: Tensor = self._model.get_input_embeddings()(ids)
        positions = np.tile(steps, (3, 1))
        for slot, each in prompts.items():
            own = np.flatnonzero(slots == slot)
            positions[:, own] = each.positions_at(steps[own])
            shown, sources = _shown(steps[own], each.places)
            if len(shown):
                states = self._states(each.pictures)[self._tensor(sources)]
                embedded = embedded.index_put((self._tensor(own[shown]),), states.to(embedded.dtype))
        return {"inputs_embeds": embedded[None], "position_ids": self._tensor(positions)[:, None]}

    def _states(self, pictures: Pictures) -> Tensor:
        states = self._kept.pop(pictures.digest, None)
        if states is None:
            pixels = self._tensor(pictures.pixels)
            grid = self._tensor(pictures.grid)
            states = picture_states(self._model, pixels, grid)
        self._kept[pictures.digest] = states
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return states

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._model.device)


def _shown(steps: Ints, places: Ints) -> tuple[Ints, Ints]:
    """Returns which of these tokens are of pictures, and of which number among all of the prompt."""
    numbers = np.searchsorted(places, steps)
    within = numbers < len(places)
    found = np.flatnonzero(within & (places[np.minimum(numbers, len(places) - 1)] == steps))
    return found, numbers[found]
