"""The generation engines, which sample completions: `interface.py` defines one, `torch_engine.py` implements it."""
