"""Finds on which GPUs each model of a job runs, and in which layout: HybridFlow's algorithms 1 and 2, extended.

    job file -> set partitions -> minimal and enumerated allocations -> auto_parallel -> cost -> FoundMapping

Sheng et al. 2025 (arXiv 2409.19256), section 6. Further: an asynchronous objective, and groups of different GPUs.
"""
