"""Kernels of others as backends, to be measured beside ours:

    python -m scripts.benchmark attention=triton,lab.peers:FLASH_ATTENTION_4 head_dim=64,128

They need the package that they come from: `pip install flash-attn-4`.
"""

from conformance.dialects import target

# without what lab.scorecards finds red in it: other head dims, and lse under a softcap
FLASH_ATTENTION_4 = target(
    "flash_attn.cute:flash_attn_func",
    "fa",
    {"window_form": "pair_or_none", "dtypes": "bf16,fp16", "head_dims": "64,128", "softcap": ""},
).backend
