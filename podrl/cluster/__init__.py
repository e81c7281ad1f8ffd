"""Models in their roles on meshes."""
