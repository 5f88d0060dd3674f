"""Decides what a step of the generation engine computes and which KV blocks its sequences own, without torch."""
