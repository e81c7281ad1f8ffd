"""Sampling: who makes which sample, under which weights, and the rows that come of it."""
