"""Plans how the weights of a trainer's ranks reach the ranks of generators, from the placements of both sides.

    placements.py         what each rank holds of each tensor of the checkpoint: a mesh, or boxes
    routes_of_parts.py    which parts of a tensor go where, once for all tensors of one shape and placement
    balance.py            which holder sends which part, and which receivers pass it on
    weight_plan.py        all of it, with the digest that both sides compare
    schedule.py           what one rank sends, receives and copies, in order
    parallel_layout.py    placements of a model under `tp2.pp2.dp2`, `fsdp8` or `zero8`
    regrouping.py         who gathers what where ranks that train generate as well

Nothing here imports torch, does I/O or draws random numbers: both sides compute the same plan.
"""
