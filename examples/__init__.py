"""Attentions to start from: copy one, change it, train with attention=examples.NAME:BACKEND.

numpy_attention is not one of them: it has the functions of one head, in NumPy.
"""
