"""Sync: the guard that orders FSDP2's unshards before their consumers."""
