"""Every claim the five documents make about attention, measured; see scripts.claims.claim for what a claim is."""

from scripts.claims import breaking, cost, memory, rounding, training  # noqa: F401  they fill CLAIMS
from scripts.claims.claim import CLAIMS

__all__ = ["CLAIMS"]
