"""Models in their roles on meshes, under RLCluster."""
