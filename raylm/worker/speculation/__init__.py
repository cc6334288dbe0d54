"""Speculative decoding: draft tokens that a step verifies together with the last known token."""
