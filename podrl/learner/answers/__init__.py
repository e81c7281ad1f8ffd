"""Algorithms that train on answers from data; samples are generated for evaluations only."""
