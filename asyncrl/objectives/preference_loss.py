"""The loss of a reward model on preferences: a pure function on flat tensors [pairs]."""

from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits


def bradley_terry_loss(better: Tensor, other: Tensor, wins: Tensor) -> Tensor:
    """Computes -log sigmoid(r_better - r_other) for each pair whose `wins` is 1; in general the cross-entropy of the
    probability sigmoid(r_better - r_other) that the first answer wins and `wins`, 0.5 for answers that are equal.

    Source: the model of Bradley and Terry (1952), as the loss of a reward model in Ouyang et al. (arXiv 2203.02155,
    eq. 1). better, other: scores, with gradient.
    """
    return binary_cross_entropy_with_logits(better - other, wins, reduction="none")
