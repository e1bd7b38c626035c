"""The GPT: the architecture of GPT-2 or modern variations; `attention` computes its attention."""

from model.generate import generate, sample_text
from model.gpt import GPT, ModelOutput
from model.hugging_face import load_hugging_face, to_hugging_face
from model.kv_cache import KVCache
from model.loss import cross_entropy, linear_cross_entropy

__all__ = [
    "GPT",
    "KVCache",
    "ModelOutput",
    "cross_entropy",
    "generate",
    "linear_cross_entropy",
    "load_hugging_face",
    "sample_text",
    "to_hugging_face",
]
