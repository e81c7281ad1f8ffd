"""One run of the program: its directory and files, and its console output."""
