"""Comparison: tables and one self-contained page that compare runs, from nothing but their folders."""
