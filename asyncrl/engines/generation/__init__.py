"""Generation engines: what samples completions. `interface.py` says what one does, `torch.py` is one."""
