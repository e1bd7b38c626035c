"""Compare the runs of a sweep: another name of scripts.report.

python -m scripts.compare multirun/DAY/TIME
"""

import sys

from scripts.report.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
