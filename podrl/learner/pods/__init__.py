"""Batches of a pod: each rollout host makes its share of a batch, each trainer host gathers the rows it trains on."""
