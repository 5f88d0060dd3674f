"""LoRA (arXiv 2106.09685): low-rank adapters beside frozen weights, and their folders in the format of peft."""
