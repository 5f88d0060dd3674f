"""Weights over point-to-point groups of two ranks: gloo on CPUs, NCCL between GPUs, one code path for both.

    trainer (rank 0) ── pair ── generation0 (rank 1)      Each pair has a communicator and a thread of its own at each
                    └── pair ── generation1 (rank 1)      end, so a receiver that dies or hangs disturbs no other.

communicator.py    what a pair does, whatever its backend
gloo.py, nccl.py   the two backends; nccl_libraries.py binds NCCL
owner_thread.py    the one thread on which a communicator is used
sender.py          the trainer's side; link_server.py answers its receivers over the encrypted control wire
receiver.py        the engine's side
"""
