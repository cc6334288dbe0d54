"""Draft tokens that a step verifies beside the one it computes anyway."""
