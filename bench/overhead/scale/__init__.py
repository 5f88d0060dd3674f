"""Measures whether the controller's work per sample grows with what is in flight, with workers or with ranks."""
