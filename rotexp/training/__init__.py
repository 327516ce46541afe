"""Training: objectives, the loop, and the coordinator that keeps ranks alike."""
