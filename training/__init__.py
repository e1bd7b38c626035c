"""What a training run needs besides the model and the data: optimizer, checkpoints, memory,
metrics, loggers, sweeps.

May import `attention`, `model`, `data` and `config`; none of them imports this package.
"""
