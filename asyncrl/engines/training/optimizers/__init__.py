"""Optimizers: of torch, and of DeepSpeed, whose ZeRO gives each rank a share of moments, gradients and weights."""
