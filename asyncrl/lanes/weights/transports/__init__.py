"""Transports bring versions of the weights to readers that cannot map the memory of their trainer.

interface.py           what a trainer and an engine see of any transport
held_version.py        a version that can be sent, whole or still arriving, and the parts in which it crosses a network
weight_stream.py       a network: the trainer's side, which waits for nobody; the server of parts; the engine, which
                       pulls, resumes and falls back
weight_files.py        versions as files in a folder
collective/            pairs of ranks over gloo or NCCL
cuda/                  memory of one GPU that processes share
"""
