"""Configurations shipped with podrl, as plain data."""
