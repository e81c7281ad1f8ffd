"""The trainer: packs samples into rows, makes the optimizer's updates, and scores tokens."""
