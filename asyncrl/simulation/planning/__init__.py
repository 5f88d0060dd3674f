"""Plans a job on named GPUs: which model runs on which of them, in which layout, and how long a step takes. Pure.

    gpus.toml, or a table of the user -> Gpu --- rates at three levels ---+
    a model folder or a name -> ModelSize --------------------------------+-> CostModel -> Interval
    job file -> set partitions -> minimal and enumerated allocations -> auto_parallel -> cost -> FoundMapping
    job, split -> stages of these seconds, run by the real controller on virtual time -> PredictedStep

Formulas compute at one level of efficiency; `CostModel` evaluates each at all three: every answer is an interval. The
search is HybridFlow's algorithms 1 and 2 (Sheng et al. 2025, arXiv 2409.19256, section 6), extended by an asynchronous
objective and groups of different GPUs.
"""
