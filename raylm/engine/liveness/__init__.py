"""Signs of life: who is lost or hangs, and which clients have gone."""
