"""Weights from one mesh to another: a plan made once on the host, and the transports that carry it out."""
