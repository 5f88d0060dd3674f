"""Weights that stay on one GPU: the trainer writes into device memory that engines of other processes map.

runtime.py        the part of CUDA that this needs, so that tests run without a device, and CUDA by CuPy
device_arena.py   two slots in device memory, stamps in shared memory; an arena in shared memory that CUDA reads
"""
