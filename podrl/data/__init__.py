"""Prompts and supervised examples: sources, tokenizer, templates, resumable streams."""
