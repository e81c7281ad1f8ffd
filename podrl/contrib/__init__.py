"""Beside podrl itself: the engine with slots of the caller, and files of other projects."""
