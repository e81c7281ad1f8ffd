"""Batches of a pod: a rollout host makes its share of each, a trainer host gathers the rows that it trains on."""
