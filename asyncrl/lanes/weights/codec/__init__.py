"""Wire codecs: how the bytes of a part of a slot cross a network. Pure functions over buffers.

chunk.py               a part in the form that travels, with digests; the choice of a codec, fall back to dense
sparse_difference.py   the elements that differ from another version, bit by bit
rounding.py            bfloat16 and float16 in place of float32
fp8_blocks.py          eight bits an element, with a power of two for each block
"""
