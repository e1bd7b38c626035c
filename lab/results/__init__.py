"""python -m lab.results: the pictures and tables of results/, drawn from the JSON files
there.
"""
