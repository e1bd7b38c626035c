"""How runs begin, sweep and end: the command line, the job, the sweep, and signals."""
