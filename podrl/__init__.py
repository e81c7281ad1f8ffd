"""podrl: reinforcement-learning post-training of language models on TPU pods."""
