"""What a process needs around the training: environment, checkpoints, metrics, deadlines."""
