"""Measures generation throughput beside transformers."""
