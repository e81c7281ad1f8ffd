"""Services around training: environment, cluster, channels, checkpoints, metrics, deadlines."""
