"""All claims, by name, in the order of the page."""

from importlib import import_module

from lab.claims.claim import CLAIMS

__all__ = ["CLAIMS"]

TOPICS = ("overflow", "rescaling", "masks", "numerics", "memory", "traffic", "speed", "training")
# importing a topic fills CLAIMS
for _topic in TOPICS:
    import_module(f"lab.claims.{_topic}")
