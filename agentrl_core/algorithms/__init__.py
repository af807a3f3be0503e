"""What all algorithms share: aggregation of losses, KL penalties, value losses."""
