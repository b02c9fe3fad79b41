"""Programs: what is computed in a step, from black boxes to meshes of layers."""
