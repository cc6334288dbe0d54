"""Every gate between a socket and an engine's queue, in the order in which a request meets them."""
