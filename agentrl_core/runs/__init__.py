"""The run directory: its files, and the records of its trajectories."""
