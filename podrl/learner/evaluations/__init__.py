"""Evaluations in a pod: trainers give them to rollout hosts or to evaluation hosts, and join the scores."""
