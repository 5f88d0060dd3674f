"""Reads prompts, and draws the prompt of each group."""

from asyncrl.tasks.prompt_rows import Draw, Prompts, Row, drawn_row
from asyncrl.tasks.prompt_sources import held_out_prompts, load_prompts, read_rows, training_prompts

__all__ = ["Draw", "Prompts", "Row", "drawn_row", "held_out_prompts", "load_prompts", "read_rows", "training_prompts"]
