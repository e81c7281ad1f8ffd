"""What a completion is worth: reward functions, and the subprocesses they run in."""
