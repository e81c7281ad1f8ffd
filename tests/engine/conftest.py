"""The tiny engine and its fixtures, as tests/tiny_engine.py makes them."""

from tiny_engine import check, policy, prompts_of, tight, tight_config, tiny, tiny_on

__all__ = ["check", "policy", "prompts_of", "tight", "tight_config", "tiny", "tiny_on"]
