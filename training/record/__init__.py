"""What a run leaves: metrics, checkpoints, names, pictures, and how it ended. It knows no model."""
