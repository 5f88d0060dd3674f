"""Where prompts come from, and which one a group gets."""

from asyncrl.tasks.draw import Draw, drawn_row
from asyncrl.tasks.prompts import Prompts, Row
from asyncrl.tasks.sources import held_out_prompts, load_prompts, training_prompts

__all__ = ["Draw", "Prompts", "Row", "drawn_row", "held_out_prompts", "load_prompts", "training_prompts"]
