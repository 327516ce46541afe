"""Orthogonal matrices: Hadamard constructions and the maths of steps on the manifold, pure."""
