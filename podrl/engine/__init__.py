"""The decode engine: it draws the tokens of samples in one running batch, and knows nothing of rewards or episodes."""
