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
    """Learning rate. Begin with 2e-4 under a million parameters, 1e-5 at 0.1 billion, 1e-6 from 0.5 billion on; with
    model.lora ten times that."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after the warm-up; `linear` and `cosine` end at 0."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the learning rate rises from 0."""
    updates: Positive = 1
    """Optimizer steps in one training step, which split the batch."""
    micro_batch_tokens: Positive = 8192
    """Most tokens in one forward and backward pass, unless one context is longer."""
    max_grad_norm: PositiveFloat = 1.0
    """Largest norm of the gradient; larger ones are scaled down to it."""
    optimizer: OptimizerName = "adamw"
    """Optimizer of torch.optim, or `adamw8bit` of the extra `bitsandbytes`."""
    optimizer_options: dict[str, Any] = Field(default={})
    """Further arguments of the optimizer, such as { momentum = 0.9 } of sgd (docs/models.md)."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """Weight decay, on matrices only."""
    betas: tuple[Decay, Decay] = (0.9, 0.999)
    """Decay rates of the first and second moment of optimizers that have two."""
    precision: Literal["float32", "bfloat16"] = "float32"
    """Precision of the trainer; bfloat16 is autocast over float32 weights."""
    gradient_checkpointing: bool = False
    """Computes activations again in the backward pass."""
    router_replay: bool = False
    """Trains with the experts that generation chose for each token (torch engine)."""
    logits_chunk: Positive = 1024
    """Tokens whose logits exist at the same time."""
    checkpoint_every: Annotated[int, Field(ge=0)] = 20
    """Steps between checkpoints; 0 writes only the first and the last one."""
    background_checkpoints: bool = True
    """Writes checkpoints while training goes on, from a copy in host memory (3 numbers a parameter with AdamW)."""
    keep_checkpoints: Positive = 2
    """Number of checkpoints that are kept."""
    keep_best: str = ""
    """Metric of which the best checkpoint is kept too, such as eval/reward/mean, or -eval/cost/mean for the lowest."""
    device: str = "cpu"
    """Device of the trainer; `cuda` gives each of several ranks the GPU of its number."""
    pool: str = ""
    """Pool of the trainer's ranks, in place of `device`."""
    engine: Literal["torch", "deepspeed"] = "torch"
    """Program that computes steps: torch, or DeepSpeed's ZeRO over the ranks of layout.dp (extra `deepspeed`)."""
    deepspeed: DeepspeedConfig = DeepspeedConfig()
    """Shares of DeepSpeed's ranks, by the table [training.deepspeed]."""
    layout: TrainingLayoutConfig = TrainingLayoutConfig()
    """Ranks of the trainer, by the table [training.layout]: {dp = 2}."""

    @property
    def zero_stage(self) -> int:
        """Returns the stage of DeepSpeed's ZeRO; 0 where torch trains."""
        return self.deepspeed.stage if self.engine == "deepspeed" else 0
