"""Algorithms that train on answers from data; nothing is generated but for evaluations."""
