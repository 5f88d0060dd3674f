"""The measurements of weights, sampling and training on a GPU, behind `asyncrl-bench gpu`.

benchmark.py       runs them, prints results and writes them with device and date
bench_device.py    the device as measurements see it, which tests replace by the CPU
device_copies.py   copies on the device, parts of tensors, transfers from host memory
shared_memory.py   CUDA memory of another process
nccl_ranks.py      two ranks of NCCL on one GPU, an abort, the event loop meanwhile
engine_updates.py  copies beside computing, and what a change of weights costs an engine
two_processes.py   decoding beside copies of another process
mps.py             NVIDIA's service that lets processes run on a GPU at once
vllm_updates.py    the pause of vLLM for a version, split by phase
language_model.py  sampling and a step of the trainer
encodings.py       differences and FP8
"""
