"""Processes of a job: the cluster, channels between hosts, deadlines, signals and the environment."""
