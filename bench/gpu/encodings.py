"""Encodings of weights on the device: measurements 9 and 10."""

import torch

from asyncrl.bench.gpu.bench_device import BenchDevice, Results

CHANGED = 0.01
BLOCK = 128
"""Weights that share one scale."""

LINKS = (1, 10, 25, 100)
"""Links in gigabits a second."""


def differences(bench: BenchDevice) -> Results:
    """Measures finding what differs in 1 % of the weights and putting it in place, and from which links on sending all
    is faster. Rates are of all weights."""
    count = bench.largest // 2
    old = torch.zeros(count, dtype=torch.int16, device=bench.device)
    new = old.clone()
    new[:: int(1 / CHANGED)] = 1
    where = torch.nonzero(new != old).flatten()
    values = new[where]

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        places = torch.nonzero(new != old).flatten()
        return places.int(), new[places]

    encoding = bench.fastest(encode)
    applying = bench.fastest(lambda: old.index_copy_(0, where, values))
    found = {"encode_GB_s": 2 * count / 1e9 / encoding, "apply_GB_s": 2 * count / 1e9 / applying}
    for gigabits in LINKS:
        dense = 2 * count / (gigabits * 1e9 / 8)
        sparse = 6 * len(where) / (gigabits * 1e9 / 8) + encoding + applying
        found[f"dense_over_sparse_at_{gigabits}_Gbit"] = dense / sparse
    return found


def fp8_blocks(bench: BenchDevice) -> Results:
    """Measures rounding of bfloat16 to FP8 with a scale for 128 weights, and its error."""
    count = max(BLOCK, bench.largest // 2 // BLOCK * BLOCK)
    weights = torch.randn(count, device=bench.device).mul_(0.02).to(torch.bfloat16)
    most = float(torch.finfo(torch.float8_e4m3fn).max)

    def encode() -> tuple[torch.Tensor, torch.Tensor]:
        blocks = weights.view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / most
        return (blocks / scale).to(torch.float8_e4m3fn), scale

    coded, scale = encode()
    error = (coded.float() * scale - weights.view(-1, BLOCK).float()).pow(2).mean().sqrt() / weights.float().std()
    return {"encode_GB_s": bench.rate(2 * count, encode), "error_share": float(error)}
