"""Engine replicas: servers, routing, placement, interpreters, weight transport."""
