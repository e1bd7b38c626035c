"""Attentions to begin from: copy one, change it, train it by attention=examples.NAME:BACKEND."""
