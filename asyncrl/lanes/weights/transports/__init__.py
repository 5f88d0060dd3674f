"""Transports bring versions of the weights to readers that cannot map the memory of their trainer.

interface.py           what a trainer and an engine see of any transport
chunk_plan.py          the parts in which a slot crosses a network
held_version.py        a version that can be sent, whole or still arriving
weight_server.py       answers who pulls parts, at the trainer and at every receiver
weight_stream.py       the trainer's side of a network: buffers, so that it waits for nobody
stream_receiver.py     the engine's side of a network: pulls, resumes, falls back
weight_files.py        versions as files in a folder
collective/            pairs of ranks over gloo or NCCL
cuda/                  memory of one GPU that processes share
"""
