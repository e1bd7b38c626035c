"""The commands that a user types: python -m scripts.NAME key=value."""

import os
import sys

from training.launch.interrupt import hide_ctrl_c

# read when torch is loaded: waiting threads sleep, as in train.py
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"} | os.environ
if sys.argv[0] == "-m":  # Python is looking for the module, whose imports take seconds
    hide_ctrl_c()
