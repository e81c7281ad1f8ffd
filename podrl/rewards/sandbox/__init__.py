"""Runs programs that a model wrote, and tests of them, in namespaces of their own."""
