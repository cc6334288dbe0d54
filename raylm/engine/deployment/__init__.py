"""Rules for all engines of an application: their names, their number, and memory for two versions at an update."""
