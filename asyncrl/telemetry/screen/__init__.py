"""Shows a run and its samples on a terminal, or in a notebook."""
