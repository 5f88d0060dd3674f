"""Tells which models' experts ranks can share out, from config.json, without torch."""

from collections.abc import Mapping
from typing import Any

from asyncrl.engines.experts.record_shape import REPLAYED as FAMILIES


def refusal_of_sharing(shape: Mapping[str, Any], ranks: int) -> str:
    """Returns why so many ranks cannot share out the experts of a model; "" where they can. shape: the content of its
    config.json."""
    family = str(shape.get("model_type") or "")
    experts = int(shape.get("num_local_experts") or shape.get("num_experts") or 0)
    if family not in FAMILIES or not experts:
        return (
            f"ep = {ranks} is not supported for the family {family!r}: ranks share out the experts of "
            f"{', '.join(FAMILIES)}; write ep = 1, and dp or shard for ranks"
        )
    if experts % ranks:
        divisors = ", ".join(str(each) for each in range(1, experts + 1) if experts % each == 0)
        return f"ep = {ranks} is not supported for a model with {experts} experts: write one of {divisors}"
    return ""
