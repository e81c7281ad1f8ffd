"""The weight transfer: moves arrays between meshes over one of several transports, by a plan that is made once."""
