"""Configurations: plain data."""
