"""What bounds requests between a client's socket and an engine's queue; docs/how_it_works.md has all gates in order."""
