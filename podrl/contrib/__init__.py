"""Additions that podrl itself does not use: an engine with slots that the caller chooses, and converters of files."""
