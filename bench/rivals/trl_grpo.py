"""Trains with TRL's synchronous GRPOTrainer on a prescribed workload; needs the interpreter of bench/rivals/setup trl.

The argument is one JSON object, made by `run_trl` in bench/end_to_end.py. The script prints one line
RESULT with a JSON list: for each optimizer step the time of its end, its tokens, mean reward, CPU seconds, generation
seconds and reward seconds.
"""

import json
import os
import sys
import time

REQUEST = json.loads(sys.argv[1])
os.environ["OMP_NUM_THREADS"] = str(REQUEST["threads"])
sys.path.insert(0, REQUEST["reward_folder"])

import asyncio  # noqa: E402
from collections.abc import Callable  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
from datasets import Dataset  # noqa: E402
from even_words_reward import share_of_even, share_of_even_slowly  # noqa: E402
from transformers import LogitsProcessorList, TrainerCallback  # noqa: E402
from trl import GRPOConfig, GRPOTrainer  # noqa: E402

torch.set_num_threads(REQUEST["threads"])
SAMPLES = REQUEST["prompts"] * REQUEST["members"]
LENGTHS = REQUEST["lengths"]
BATCH: dict[str, Any] = {"tokens": 0, "reward": [], "generation": 0.0, "reward_seconds": 0.0}
STEPS: list[dict[str, Any]] = []


class PrescribedTrlLengths:
    """Ends row i after lengths[i] tokens: forbids the end token before, and every other token then."""

    def __init__(self, rows: int, prompt_tokens: int, eos: int) -> None:
        self.lengths = torch.tensor((LENGTHS * (rows // SAMPLES))[:rows])
        self.prompt_tokens = prompt_tokens
        self.eos = eos

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores[:, self.eos] = -torch.inf
        ends = self.lengths == ids.shape[1] - self.prompt_tokens + 1
        scores[ends] = -torch.inf
        scores[ends, self.eos] = 0.0
        return scores


def score(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    began = time.perf_counter()
    rewards = [share_of_even(text) for text in completions]
    return recorded(rewards, completion_ids, began)


async def score_slowly(completions: list[str], completion_ids: list[list[int]], **_: Any) -> list[float]:
    began = time.perf_counter()
    rewards = await asyncio.gather(*(share_of_even_slowly(text, REQUEST["parallel_scores"]) for text in completions))
    return recorded(rewards, completion_ids, began)


def recorded(rewards: list[float], completion_ids: list[list[int]], began: float) -> list[float]:
    BATCH["tokens"] += sum(map(len, completion_ids))
    BATCH["reward"] += rewards
    BATCH["reward_seconds"] += time.perf_counter() - began
    return list(rewards)


class Clock(TrainerCallback):
    """Records each step; tokens of a generation that serves several steps count with its first step."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        rewards = BATCH["reward"]
        tokens = BATCH["tokens"]
        mean = sum(rewards) / len(rewards) if rewards else None
        line = {"ended": time.perf_counter(), "tokens": tokens, "reward": mean, "cpu": time.process_time()}
        STEPS.append({**line, "generation": BATCH["generation"], "reward_seconds": BATCH["reward_seconds"]})
        BATCH.update(tokens=0, reward=[], generation=0.0, reward_seconds=0.0)


def timed_generate(model: Any, eos: int) -> Callable[..., Any]:
    generate = model.generate

    def prescribed(**inputs: Any) -> Any:
        began = time.perf_counter()
        rows, prompt_tokens = inputs["input_ids"].shape
        processors = LogitsProcessorList([PrescribedTrlLengths(rows, prompt_tokens, eos)])
        result = generate(**inputs, logits_processor=processors)
        BATCH["generation"] += time.perf_counter() - began
        return result

    return prescribed


def settings() -> GRPOConfig:
    micro = REQUEST["micro_batch"]
    accumulate = SAMPLES // micro
    given = {} if REQUEST["gradient_checkpointing"] else {"gradient_checkpointing": False}
    return GRPOConfig(
        output_dir=REQUEST["output"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=accumulate,
        steps_per_generation=accumulate * REQUEST["generations"],
        num_generations=REQUEST["members"],
        max_completion_length=max(LENGTHS),
        max_steps=REQUEST["steps"],
        learning_rate=REQUEST["learning_rate"],
        lr_scheduler_type="constant",
        beta=0.0,
        bf16=False,
        use_cpu=True,
        logging_steps=1000,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=0,
        **given,
    )


def main() -> None:
    with open(REQUEST["prompts_file"]) as file:
        rows = Dataset.from_list([json.loads(line) for line in file])
    reward = score_slowly if REQUEST["parallel_scores"] is not None else score
    trainer = GRPOTrainer(
        model=REQUEST["model"], reward_funcs=reward, args=settings(), train_dataset=rows, callbacks=[Clock()]
    )
    model = trainer.model
    assert next(model.parameters()).dtype == torch.float32
    model.generate = timed_generate(model, trainer.processing_class.eos_token_id)
    trainer.train()
    print("RESULT " + json.dumps(STEPS))


main()
