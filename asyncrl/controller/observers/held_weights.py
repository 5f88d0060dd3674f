"""Describes the weights that each pipeline stage of the trainer holds, for a person who compares ranks or versions."""

import math
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from xxhash import xxh3_64_hexdigest

from asyncrl.errors import DeadlineExceeded, PeerLost, Refused
from asyncrl.protocols.messages import HeldWeights
from asyncrl.protocols.service_contracts import Training


async def describe_weights(training: Training, pattern: str) -> str:
    """Returns a line for each stage, and one for each of its tensors whose name matches the pattern. Raises Refused
    when the trainer does not answer, or no name matches."""
    try:
        held = await training.held_weights()
    except (PeerLost, DeadlineExceeded) as lost:
        raise Refused(f"the trainer did not say what weights it holds: {lost}") from lost
    names = [name for stage in held for name in stage.tensors]
    if pattern and not any(fnmatchcase(name, pattern) for name in names):
        raise Refused(f"no tensor is called {pattern!r}; one is called {names[0]!r}")
    return "\n".join(weights_lines(held, pattern))


def weights_lines(held: Sequence[HeldWeights], pattern: str = "") -> Iterator[str]:
    """Yields a table: the digest of a stage is that of the digests of its tensors, in the order of their names."""
    first = held[0]
    yield f"weights of version {first.version}, incarnation {first.incarnation}, between two steps"
    yield f"{'stage':>5}  {'worker':<28} {'tensors':>7} {'norm':>12}  digest"
    for stage in sorted(held, key=lambda each: each.stage):
        digests, norms = zip(*(stage.tensors[name] for name in sorted(stage.tensors)), strict=True)
        own = f"{stage.stage:>5}  {stage.instance:<28} {len(norms):>7}"
        yield f"{own} {math.hypot(*norms):>12.6g}  {xxh3_64_hexdigest(''.join(digests).encode())}"
        for name, (digest, norm) in stage.tensors.items():
            if pattern and fnmatchcase(name, pattern):
                yield f"       {name:<36} {norm:>12.6g}  {digest}"
