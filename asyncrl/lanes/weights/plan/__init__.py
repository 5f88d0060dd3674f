"""Plans how the weights of a trainer's ranks reach the ranks of generators, from the placements of both sides.

    placements.py         what each rank holds of each tensor of the checkpoint: a mesh, or boxes
    routes_of_parts.py    which parts of a tensor go where, who sends them and which receivers pass them on
    weight_plan.py        all of it, with the digest that both sides compare, and layouts such as `tp2.pp2.dp2`
    schedule.py           what one rank sends, receives and copies, in order
    regrouping.py         who gathers what where ranks that train generate as well

Nothing here imports torch, does I/O or draws random numbers: both sides compute the same plan.
"""
