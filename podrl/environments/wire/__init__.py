"""The dialects of the front: pure functions that parse JSON to a ParsedRequest, and write an Answer as JSON."""
