"""Sharding: which strategy splits which parameter over which ranks, and how a shard is read and written."""
