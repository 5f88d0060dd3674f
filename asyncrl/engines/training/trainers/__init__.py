"""The trainers of policy and critic on PyTorch, and their steps."""
