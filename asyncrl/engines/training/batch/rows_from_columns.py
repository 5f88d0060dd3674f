"""Which columns of a sample training reads, and a sample as the engines take it."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from asyncrl.config import Algorithm, Config
from asyncrl.engines.training.interface import TrainRow
from asyncrl.engines.training.packing import micro_batches
from asyncrl.engines.training.signals import COST, REWARD, Signal
from asyncrl.protocols.batch import GREEDY, Batch, BatchRef, Cuts

PLAIN = ("prompt_ids", "response_ids", "logprobs", "versions")
REFERENCE = "reference_logprobs"


def columns_of(algorithm: Algorithm) -> list[str]:
    """Those that the algorithm needs."""
    reference = [REFERENCE] if algorithm.kl > 0 else []
    return [*PLAIN, *reference, *(column for each in signals_of(algorithm) for column in (each.values, each.judged_at))]


def forward_passes(rows: Batch, config: Config) -> list[list[int]]:
    """Numbers of the rows of each pass of a model that only reads them; with `generation.deterministic` each row has a
    pass of its own, so that its bits depend on nothing else."""
    if config.generation.deterministic:
        return [[row] for row in range(len(rows))]
    return micro_batches(rows.row_weights(), config.training.micro_batch_tokens)


def token_ids(rows: Batch) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Of the prompts and of the responses, as models take them."""
    prompts, responses = ([ids.astype(np.int64) for ids in rows[name]] for name in PLAIN[:2])
    return prompts, responses


def signals_of(algorithm: Algorithm) -> list[Signal]:
    """What critics judge."""
    if algorithm.advantage != "gae":
        return []
    return [REWARD] if algorithm.constraint == "none" else [REWARD, COST]


def train_rows(refs: BatchRef, batch: Batch, temperature: float) -> list[TrainRow]:
    """The samples of these references, whose rows these are."""
    prompts, responses, logprobs, versions = (batch[name] for name in PLAIN)
    references, costs = batch.columns.get(REFERENCE), batch.columns.get(COST.values)
    values = batch.columns.get(REWARD.values)
    rows = []
    for index, ref in enumerate(refs):
        assert ref.advantage is not None, f"sample {ref.key} reached the trainer without an advantage"
        assert ref.member != GREEDY, f"the greedy answer of group {ref.group} reached the trainer; it is no sample"
        rows.append(
            TrainRow(
                group=ref.group,
                member=ref.member,
                attempt=ref.attempt,
                epoch=ref.epoch,
                prompt_ids=prompts[index].astype(np.int64),
                response_ids=responses[index].astype(np.int64),
                logprobs=logprobs[index],
                versions=versions[index].astype(np.int64),
                advantage=ref.advantage,
                temperature=temperature,
                truncated=ref.finish == "length",
                reference_logprobs=references[index] if references is not None else None,
                values=values[index] if values is not None else None,
                judged_at=int(batch[REWARD.judged_at][index][0]) if values is not None else 0,
                cost=ref.cost,
                cost_values=costs[index] if costs is not None else None,
                cost_judged_at=int(batch[COST.judged_at][index][0]) if costs is not None else 0,
            )
        )
    return rows


def batch_digest(cuts: Cuts) -> str:
    """sha256 hex over which samples a step trains, with which advantages and costs."""
    facts = [(row.group, row.member, row.attempt, row.advantage, row.cost) for row in cuts.batch]
    return hashlib.sha256(repr((cuts.epoch, cuts.version, facts)).encode()).hexdigest()
