"""Rotations: their matrices, their one owner, where they act, how they are merged and proven."""
