"""A job: its configuration, the devices it uses, its description, and the run itself."""
