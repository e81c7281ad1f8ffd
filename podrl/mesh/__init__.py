"""Meshes, the rules that place arrays on them, and the move of weights between them."""
