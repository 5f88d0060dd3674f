"""Engines that train the policy: rows in, optimizer steps on float32 master weights, named tensors out."""
