"""A module per finding, with its measurement and its figure. The pages are in docs/findings/."""
