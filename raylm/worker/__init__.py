"""Front door of this room."""
