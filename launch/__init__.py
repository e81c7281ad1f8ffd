"""Submits `python -m podrl.launch` to machines; imports neither podrl nor jax. Installed as podrl.launchers."""
