"""The loss of a micro-batch: log-probs, token advantages, policy loss and pretraining loss."""
