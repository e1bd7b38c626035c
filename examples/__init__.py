"""Attentions to start from: copy one, change it, train with attention=examples.NAME:BACKEND."""
