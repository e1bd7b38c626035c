"""The commands that a user types: python -m scripts.NAME key=value."""

import training  # noqa: F401 - before torch, for how waiting threads behave
