"""Face: what `import rotexp` gives, for notebooks, scripts and other people's training loops."""
