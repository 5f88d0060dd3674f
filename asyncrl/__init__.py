"""asyncrl: reinforcement learning of language models on a fleet of asyncio services."""

__version__ = "0.1.0"
