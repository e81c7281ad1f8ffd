"""Fixtures of the tiny engine that tests/tiny_engine.py makes."""

from tiny_engine import check, policy, prompts_of, tight, tight_config, tiny, tiny_on

__all__ = ["check", "policy", "prompts_of", "tight", "tight_config", "tiny", "tiny_on"]
