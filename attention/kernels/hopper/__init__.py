"""Flash-attention for NVIDIA's Hopper GPUs (sm_90) in Gluon, Triton's lower-level language, which
gives each warp of a program its own role.
"""
