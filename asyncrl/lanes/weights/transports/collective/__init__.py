"""Weights over point-to-point groups of two ranks: gloo on CPUs, NCCL between GPUs, one code path for both.

    trainer (rank 0) ── pair ── generation0 (rank 1)      Each pair has a communicator and a thread of its own at each
                    └── pair ── generation1 (rank 1)      end, so a receiver that dies or hangs disturbs no other.

communicator.py    what a pair does, whatever its backend, and the one thread on which it does so
gloo.py, nccl.py   the two backends
transfer.py        the trainer's side and the engine's, which speak over the encrypted control wire
"""
