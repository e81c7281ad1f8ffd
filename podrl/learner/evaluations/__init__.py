"""Evaluations in a pod: trainers give shares of them to rollout hosts or to evaluation hosts, and join the scores."""
