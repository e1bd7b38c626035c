"""What a training run needs besides the model and the data: optimizer, checkpoints, memory,
metrics, loggers, sweeps.

Works on any `nn.Module` and on plain dictionaries; imports neither `model` nor `attention`.
"""
