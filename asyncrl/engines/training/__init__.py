"""The training engines: they update the policy and the critics from sampled batches."""
