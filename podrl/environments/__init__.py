"""Environments and tools: what a sample acts on while it is generated."""
