"""Architectures without a decoder of our own, run by transformers' modeling code over paged attention."""
