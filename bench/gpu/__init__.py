"""Measures on a GPU what tests on CPUs cannot see: bandwidth, latency, and what the driver allows.

benchmark.py           the command: what is measured, and how results are written
bench_device.py        the device, its clock and its memory
weights_on_device.py   copies on the device and from host memory, and what a change of weights costs an engine
shared_memory.py       CUDA memory of another process, which is `python -m` this file
nccl_ranks.py          two ranks of NCCL on one device, each `python -m` this file
language_model.py      sampling, a step of the trainer, and the pause of vLLM for a version of the weights
"""
