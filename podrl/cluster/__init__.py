"""The models of a job in their roles, on their meshes; RLCluster holds them."""
