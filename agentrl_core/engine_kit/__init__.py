"""What engine plugins share: checks of requests, ports, weight files and weight groups."""
