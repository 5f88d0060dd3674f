"""Measures the latency of control calls beside queued work and in a flood of messages."""
