"""Sampling: the players of samples, the clocks that choose versions of the weights, and finished rows."""
