"""Builds training rows from the columns of the data lane: which columns an algorithm reads, and the rows themselves."""

import hashlib

import numpy as np
from numpy.typing import NDArray

from asyncrl.config.schema import AlgorithmConfig, Config
from asyncrl.engines.training.batch.packing import micro_batches
from asyncrl.engines.training.batch.value_targets import COST, REWARD, ValueTarget
from asyncrl.engines.training.interface import TrainRow
from asyncrl.protocols.batch import GREEDY, Batch, BatchRef, Cuts

PLAIN = ("prompt_ids", "response_ids", "logprobs", "versions")
REFERENCE = "reference_logprobs"


def columns_of(algorithm: AlgorithmConfig) -> list[str]:
    """Returns the columns that the algorithm reads."""
    reference = [REFERENCE] if algorithm.kl > 0 else []
    targets = value_targets_of(algorithm)
    return [*PLAIN, *reference, *(column for each in targets for column in (each.values, each.valued_at))]


def forward_passes(rows: Batch, config: Config) -> list[list[int]]:
    """Groups row indices into the forward passes of a model that does not train.

    With `generation.deterministic` each row has a pass of its own, so that its bits do not depend on other rows.
    """
    if config.generation.deterministic:
        return [[row] for row in range(len(rows))]
    return micro_batches(rows.row_weights(), config.training.micro_batch_tokens)


def token_ids(rows: Batch) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
    """Returns the token ids of prompts and of responses as int64."""
    prompts, responses = ([ids.astype(np.int64) for ids in rows[name]] for name in PLAIN[:2])
    return prompts, responses


def value_targets_of(algorithm: AlgorithmConfig) -> list[ValueTarget]:
    """Returns the targets for which the algorithm has a critic."""
    if algorithm.advantage != "gae":
        return []
    return [REWARD] if algorithm.constraint == "none" else [REWARD, COST]


def train_rows(refs: BatchRef, batch: Batch, temperature: float) -> list[TrainRow]:
    """Joins the references of samples with their rows in `batch`, which has the same order."""
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
                incarnation=ref.incarnation,
                prompt_ids=prompts[index].astype(np.int64),
                response_ids=responses[index].astype(np.int64),
                logprobs=logprobs[index],
                versions=versions[index].astype(np.int64),
                advantage=ref.advantage,
                temperature=temperature,
                truncated=ref.finish == "length",
                reference_logprobs=references[index] if references is not None else None,
                values=values[index] if values is not None else None,
                valued_at=int(batch[REWARD.valued_at][index][0]) if values is not None else 0,
                cost=ref.cost,
                cost_values=costs[index] if costs is not None else None,
                cost_valued_at=int(batch[COST.valued_at][index][0]) if costs is not None else 0,
            )
        )
    return rows


def batch_digest(cuts: Cuts) -> str:
    """Returns the sha256 (hex) of the samples of a step with their advantages and costs."""
    facts = [(row.group, row.member, row.attempt, row.advantage, row.cost) for row in cuts.batch]
    return hashlib.sha256(repr((cuts.incarnation, cuts.version, facts)).encode()).hexdigest()
