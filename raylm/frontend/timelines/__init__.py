"""The timelines of requests: Timelines stores records, ``describe`` computes phases and causes from them."""
