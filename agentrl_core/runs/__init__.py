"""The run directory: its files, the records of its trajectories, the index of all runs."""
