"""Which mistakes the published tests of attention pass; see __main__."""
