"""Predicting a job on TPU machines that are not there."""
