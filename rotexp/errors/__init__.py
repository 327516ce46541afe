"""Errors of one line: what is required, what libraries raise, words that many messages need."""
