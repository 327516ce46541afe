"""Sharding: which strategy splits which parameter over which ranks, how a shard is read and written, the guard."""
