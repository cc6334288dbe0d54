"""State shared by all ingress replicas of an application: limits of keys, adapters, metrics."""
