"""All claims, by name, in the order of the page."""

from importlib import import_module

from lab.claims.claim import CLAIMS

__all__ = ["CLAIMS", "FIRST"]

TOPICS = ("overflow", "rescaling", "masks", "numerics", "memory", "traffic", "speed", "training")
# the ten mistakes that cost a reader most, which the page shows first
FIRST = (
    "no_rescale_converges_worse",
    "no_max_in_training",
    "sums_of_tens",
    "overflow_gives_nan",
    "causal_as_printed",
    "linear_memory",
    "bit_for_bit",
    "statistics_in_input_dtype",
    "missing_beta",
    "traffic_is_linear",
)
# importing a topic fills CLAIMS
for _topic in TOPICS:
    import_module(f"lab.claims.{_topic}")
