"""Gets `python -m podrl.launch` onto machines. Nothing here imports podrl or jax."""
