"""What a run needs, found without a GPU: the workers' own code on tensors without data."""
