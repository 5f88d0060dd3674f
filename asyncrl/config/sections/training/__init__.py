"""The section of the trainer: its optimizer and the layout of its ranks."""
