"""A slot in one tensor of bytes, on any device."""

import torch
from torch import Tensor

from asyncrl.lanes.weights.slot_memory import digest_range, digest_text, refuse_other_digest
from asyncrl.lanes.weights.tensor_spec import DTYPES, WeightsSpec
from asyncrl.protocols.messages import Published


def new_block(spec: WeightsSpec, device: str) -> Tensor:
    """Allocates a slot, uint8 [spec.size]. Raises what torch raises when the device has too little memory."""
    return torch.empty(spec.size, dtype=torch.uint8, device=device)


def block_views(block: Tensor, spec: WeightsSpec) -> dict[str, Tensor]:
    """Returns the tensors of a slot, by their own names, without a copy."""
    dtype = DTYPES[spec.dtype]
    return {
        tensor.name: block[tensor.offset : tensor.offset + tensor.bytes].view(dtype).view(tensor.shape)
        for tensor in spec.tensors
    }


def block_digest(block: Tensor, spec: WeightsSpec, name: str) -> str:
    """Computes the digest of a tensor, "" for the whole slot. Of a device this reads the bytes back, after all that was
    enqueued before on the current stream."""
    start, stop = digest_range(spec, name)
    return digest_text(block[start:stop].cpu().numpy().data)


def check_block_digest(block: Tensor, spec: WeightsSpec, published: Published) -> None:
    """Raises WeightsError unless the slot has the published digest."""
    if published.digest:
        refuse_other_digest(block_digest(block, spec, published.digest_of), published)
