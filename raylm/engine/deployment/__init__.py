"""What holds for the engines of an application together: their names, their number, the memory of two versions."""
