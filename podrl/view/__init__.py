"""podrl.view: a local page that shows run directories, and the same page as one file."""
