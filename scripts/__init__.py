"""The commands that a user types: python -m scripts.NAME key=value."""

import sys

from training.interrupt import hide_ctrl_c

if sys.argv[0] == "-m":  # Python is looking for the module, whose imports take seconds
    hide_ctrl_c()
