"""What holds for every route: middleware, keys, bodies, errors, streams, probes."""
