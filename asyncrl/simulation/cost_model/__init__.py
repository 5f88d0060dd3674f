"""Predicts seconds and bytes of generation, scoring, training and transfers of weights on named GPUs. Pure.

    gpus.toml, or a table of the user -> Gpu --- rates at three levels ---+
    a model folder or a name -> ModelSize --------------------------------+-> CostModel -> Interval

Formulas compute at one level of efficiency; `CostModel` evaluates each at all three: every answer is an interval.
"""
