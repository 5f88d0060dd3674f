"""Transports bring versions of the weights to readers that cannot map the memory of their trainer.

transport_ends.py        what a trainer and an engine see of any transport, and how a run opens both ends
version_transfer.py      what networks share: parts, ends of the lane, versions that arrive, and their receiver
weight_stream.py         a network: the trainer's side, which waits for nobody; the server of parts; the engine, which
                         pulls, resumes and falls back
weight_files.py          versions as files in a folder
collective_transfer.py   pairs of ranks: both sides, which speak over the encrypted control wire
communicator.py          what a pair does, the one thread on which it does so, and gloo; nccl.py is the other backend
device_arena.py          memory of one GPU that processes share

    trainer (rank 0) ── pair ── generation0 (rank 1)      Each pair has a communicator and a thread of its own at each
                    └── pair ── generation1 (rank 1)      end, so a receiver that dies or hangs disturbs no other.
"""
