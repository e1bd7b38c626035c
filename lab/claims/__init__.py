"""What five documents claim about flash attention, measured. lab.claims.claim defines a claim."""

from importlib import import_module

from lab.claims.claim import CLAIMS

__all__ = ["CLAIMS"]

TOPICS = "overflow rescaling masks numerics memory traffic speed training"
# importing a topic fills CLAIMS; the page has the same order
for _topic in TOPICS.split():
    import_module(f"lab.claims.{_topic}")
