"""A real control plane, with fake nodes."""
