"""What became of each request and when: Timelines keeps it, ``describe`` makes phases and causes of it."""
