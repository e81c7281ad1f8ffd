"""The pull transport: rollout processes fetch weights from trainer processes of another cluster."""
