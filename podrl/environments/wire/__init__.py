"""The dialects of the front: pure functions that parse a client's JSON to an Ask, and write an Answer as JSON."""
