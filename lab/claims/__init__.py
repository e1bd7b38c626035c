"""Every claim the five documents make about attention, measured; see lab.claims.claim for what
a claim is.
"""

from importlib import import_module

from lab.claims.claim import CLAIMS

__all__ = ["CLAIMS"]

# importing them fills CLAIMS, in the order of the pages
for _topic in (
    "exactness",
    "examples",
    "masks",
    "overflow",
    "rescaling",
    "sizes",
    "alive",
    "traffic",
    "chips",
    "speed",
    "training",
):
    import_module(f"lab.claims.{_topic}")
