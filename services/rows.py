"""Rows as trainer and reference read them."""

import numpy as np

from asyncrl.engines.training.interface import TrainRow
from asyncrl.protocols.batch import BatchRef
from asyncrl.service import WorkerContext

PLAIN = ("prompt_ids", "response_ids", "logprobs", "versions")
REFERENCE = "reference_logprobs"


async def read_train_rows(context: WorkerContext, refs: BatchRef) -> list[TrainRow]:
    """The samples behind these references, in order. Raises LostRows when one is gone."""
    with_reference = context.config.algorithm.kl > 0
    batch = await context.reader.read(refs, [*PLAIN, REFERENCE] if with_reference else list(PLAIN))
    prompts, responses, logprobs, versions = (batch[name] for name in PLAIN)
    references = batch[REFERENCE] if with_reference else None
    rows = []
    for index, ref in enumerate(refs):
        assert ref.advantage is not None, f"sample {ref.key} reached the trainer without an advantage"
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
                temperature=context.config.generation.temperature,
                truncated=ref.finish == "length",
                reference_logprobs=references[index] if references is not None else None,
            )
        )
    return rows
