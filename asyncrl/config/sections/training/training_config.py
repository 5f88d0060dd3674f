"""The section `[training]`: the optimizer and the trainer."""

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from asyncrl.config.sections.algorithm_config import Decay, Positive, PositiveFloat, Section
from asyncrl.config.sections.training.deepspeed_config import DeepspeedConfig
from asyncrl.config.sections.training.layout_config import TrainingLayoutConfig
from asyncrl.config.sections.training.optimizers import OPTIMIZERS, UNSUPPORTED


def _supported(name: Any) -> Any:
    key = str(name).lower().replace("_", "")
    if key in UNSUPPORTED:
        raise ValueError(f"{key} is not supported: {UNSUPPORTED[key]}; there are {', '.join(OPTIMIZERS)}")
    return key if key in OPTIMIZERS else name


if TYPE_CHECKING:
    OptimizerName = str
else:
    OptimizerName = Annotated[Literal[tuple(OPTIMIZERS)], BeforeValidator(_supported)]


class TrainingConfig(Section):
    """The optimizer and the trainer."""

    learning_rate: Annotated[float, Field(ge=0)] = 1e-6
    """Learning rate of the policy. Begin with 2e-4 under a million parameters, 1e-5 at 0.1 billion, 1e-6 from
    0.5 billion on; with model.lora ten times that."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up. `linear` and `cosine` fall to 0 at the last step."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Number of training steps in which the learning rate rises from 0."""
    updates: Positive = 1
    """Number of optimizer steps in one training step. The batch is split over them."""
    micro_batch_tokens: Positive = 8192
    """Largest number of prompt and response tokens in one forward and backward pass, unless one context is longer."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient. Larger gradients are scaled down to it."""
    optimizer: OptimizerName = "adamw"
    """Optimizer, by its name in torch.optim, or `adamw8bit` of bitsandbytes (extra `bitsandbytes`)."""
    optimizer_options: dict[str, Any] = Field(default={})
    """Further arguments of the optimizer, e.g. { momentum = 0.9 } of sgd. docs/models.md lists them."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay, on matrices only."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moment of optimizers that have two."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trainer's computation. bfloat16 is autocast over float32 master weights."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass instead of keeping them. This saves memory and costs time."""
    router_replay: bool = False
    """Trains a model of experts with those that generation chose for each token: the torch engine records them, and the
    router's gradient goes through their weights."""
    logits_chunk: Positive = 1024
    """Number of tokens whose logits exist at the same time."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Number of steps between checkpoints. 0 writes only the first and the last one."""
    background_checkpoints: bool = True
    """Writes checkpoints while training goes on, from a copy of weights and optimizer state in the memory of the host,
    3 numbers a parameter with AdamW. False: nothing is copied, and training waits."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints that are kept."""
    keep_best: str = ""
    """Metric of which the best checkpoint is kept besides, e.g. eval/reward/mean; -eval/cost/mean: the lowest. Versions
    that are evaluated then get a checkpoint. Empty: none is kept for its metrics."""
    device: str = "cpu"
    """Device of the trainer. With several ranks, `cuda` gives each rank the GPU of its number."""
    pool: str = ""
    """Pool of the trainer's ranks, a table of `pools`, where each has a GPU; `device` is then not read."""
    engine: Literal["torch", "deepspeed"] = "torch"
    """Program that computes steps: torch, or DeepSpeed (extra `deepspeed`), whose ZeRO shares out moments,
    gradients and weights over the ranks of layout.dp."""
    deepspeed: DeepspeedConfig = DeepspeedConfig()
    """Shares of DeepSpeed's ranks: a table with `stage` (1: moments, 2: gradients too, 3: weights too) and `offload`
    (true: moments are in the memory of the host). Read with engine = "deepspeed"."""
    layout: TrainingLayoutConfig = TrainingLayoutConfig()
    """Ranks of the trainer, one process each: a table with the keys `dp` (copies of the weights), `shard` (ranks that
    share out the weights of a copy, as FSDP does), `tp` (ranks that compute each layer together), `pp` (stages that
    hold some of the layers each; alone, or beside tp or dp), `sp` (ranks that compute a slice of the tokens of each
    row; alone, or beside dp) and `ep` (ranks that share out the experts of each layer; alone, or beside dp), such as
    {dp = 2}. A step's samples are divided over dp x shard x ep by their tokens."""

    @property
    def zero_stage(self) -> int:
        """Returns the stage of DeepSpeed's ZeRO; 0 where torch trains."""
        return self.deepspeed.stage if self.engine == "deepspeed" else 0
