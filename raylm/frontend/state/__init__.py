"""What all ingress replicas of an application agree on: limits of keys, adapters, metrics."""
