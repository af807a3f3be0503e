"""Code that is not ours: tools, rewards and environments in child processes, with deadlines."""
