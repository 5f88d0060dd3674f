"""The twelve measurements of weights on a GPU, behind `asyncrl-bench gpu`.

benchmark.py       runs them, prints results and writes them with device and date
bench_device.py    the device as measurements see it, which tests replace by the CPU
device_copies.py   copies on the device, parts of tensors, transfers from host memory
shared_memory.py   CUDA memory of another process
nccl_ranks.py      two ranks of NCCL on one GPU, an abort, the event loop meanwhile
engine_updates.py  copies beside computing, and what a change of weights costs an engine
encodings.py       differences and FP8
"""
