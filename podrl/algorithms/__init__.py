"""Reinforcement-learning arithmetic as pure functions: arrays in, arrays out; no config, mesh, clock or logging."""
