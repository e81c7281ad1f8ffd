"""The weight transfer: moves arrays between meshes by a plan made once on the host, over several transports."""
