"""Kernels from other packages as backends, to compare with ours:

    python -m scripts.benchmark attention=triton,lab.peers:FLASH_ATTENTION_4 head_dim=64,128

They need their package: `pip install flash-attn-4`.
"""

from conformance.dialects import target

# leaves out what is red in lab.scorecards: other head dims, and lse with a softcap
FLASH_ATTENTION_4 = target(
    "flash_attn.cute:flash_attn_func",
    "fa",
    {"window_form": "pair_or_none", "dtypes": "bf16,fp16", "head_dims": "64,128", "softcap": ""},
).backend
