"""From prompts to trajectories: manager, workers, sessions, trajectory builder, batching."""
