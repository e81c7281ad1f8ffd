"""The learner: the training loop, the algorithms, and the sources of their batches."""
