"""Reads prompts, and draws the prompt of each group."""

from asyncrl.tasks.prompt_sources import held_out_prompts, load_prompts, training_prompts
from asyncrl.tasks.prompts import Draw, Prompts, Row, drawn_row

__all__ = ["Draw", "Prompts", "Row", "drawn_row", "held_out_prompts", "load_prompts", "training_prompts"]
