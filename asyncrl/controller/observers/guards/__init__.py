"""Guards find training that comes to nothing."""
