"""Reward functions, and the subprocesses they run in."""
