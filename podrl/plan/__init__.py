"""Predicts memory and speed of a job on TPU machines, without the machines."""
