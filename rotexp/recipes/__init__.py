"""Recipes: runs that can be made again, and whether their figures hold."""
