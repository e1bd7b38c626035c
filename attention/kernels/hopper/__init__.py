"""Flash-attention for NVIDIA's Hopper GPUs (sm_90) in Gluon, the language under Triton, where a
program's warps have parts of their own.
"""
