"""Algorithms that train on given answers; nothing is generated but for evaluations."""
