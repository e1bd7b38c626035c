"""What a run does: its parts, a step, an evaluation, and a look at the attention's health."""
