"""The decode engine: it draws the tokens of samples in one running batch, and knows neither rewards nor episodes."""
