"""podrl.view: a local page over run directories, and the same as one file."""
