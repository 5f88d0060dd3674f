"""The engines that compute: generation engines sample, training engines update the policy and the critics."""
