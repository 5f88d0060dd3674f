"""Elements of float32 as bfloat16 or float16: half the bytes, rounded to nearest, ties to even.

For a weight x in the normal range of the format the error is at most |x| / 2^8 for bfloat16 and |x| / 2^11 for float16;
below 2^-14, float16 errs by at most 2^-25.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from asyncrl.errors import WeightsError

Bytes = NDArray[np.uint8]


def encode_bfloat16(new: Bytes) -> Bytes:
    """Returns the elements of `new`, float32 and writable, as bfloat16."""
    return torch.from_numpy(new).view(torch.float32).to(torch.bfloat16).view(torch.uint8).numpy()


def encode_float16(new: Bytes) -> Bytes:
    """Returns the elements of `new`, float32, as float16: infinite where they exceed its range."""
    with np.errstate(over="ignore"):
        return new.view("<f4").astype("<f2").view(np.uint8)


def decode_bfloat16(data: Bytes, target: Bytes) -> None:
    """Fills `target` with float32. Raises WeightsError when the data has another number of elements."""
    _check(data, target)
    np.left_shift(data.view("<u2"), 16, out=target.view("<u4"), dtype="<u4")


def decode_float16(data: Bytes, target: Bytes) -> None:
    """Fills `target` with float32. Raises WeightsError when the data has another number of elements."""
    _check(data, target)
    target.view("<f4")[:] = data.view("<f2")


def _check(data: Bytes, target: Bytes) -> None:
    if 2 * len(data) != len(target):
        raise WeightsError(f"{len(data)} bytes of two an element cannot fill {len(target)} bytes of float32")
