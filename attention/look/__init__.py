"""Looking at an attention from outside, while it runs or before:

diagnose.py   the largest score, the first tile that leaves the finite range, the distance from
              exact attention
trace.py      the replay of one call, tile by tile
try_out.py    a user's attention before a run trains with it
blame.py      whose file raised an error
"""
