"""The tables `training.layout`, `critic.layout` and others: how ranks share rows and weights."""

from asyncrl.config.sections.algorithm_config import Positive, Section


class LayoutConfig(Section):
    """Sizes of the axes; the trainer, or a replica of another service, has pp x tp x sp x dp x shard x ep ranks, one
    process each. pp, sp and ep are of the trainer alone."""

    pp: Positive = 1
    """Pipeline stages, each of which holds some of the layers; all stages train the same rows."""
    tp: Positive = 1
    """Tensor-parallel ranks, which hold parts of every layer and train the same rows."""
    sp: Positive = 1
    """Ranks that hold the same weights and train the same rows, each a slice of the tokens of every row (Ulysses)."""
    dp: Positive = 1
    """Copies of the weights, each of which trains rows of its own."""
    shard: Positive = 1
    """Ranks that share out the weights of a copy, as FSDP does, and train rows of their own."""
    ep: Positive = 1
    """Ranks that share out the experts of each layer, hold all other weights, and train rows of their own."""

    @property
    def data(self) -> int:
        """Returns the number of ranks with rows of their own."""
        return self.dp * self.shard * self.ep

    @property
    def size(self) -> int:
        """Returns the number of ranks."""
        return self.pp * self.tp * self.sp * self.data
