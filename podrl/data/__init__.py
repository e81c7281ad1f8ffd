"""The data of a job: sources of prompts and supervised examples, tokenizer, templates and resumable streams."""
