"""Optimizers on the orthogonal matrices: their options (`options`, without torch), their maths and the optimizers."""
