"""Optimizers on the orthogonal matrices: their options (`options`, without torch), their Protocol, ours."""
