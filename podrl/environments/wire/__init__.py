"""The dialects of the front: pure functions from a client's JSON to an Ask, and from its Answer to JSON."""
