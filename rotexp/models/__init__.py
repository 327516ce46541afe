"""Models: which families are supported, where their weights come from, how they are built."""
