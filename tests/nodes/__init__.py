"""Real nodes: pods of the real images, and machines that are taken."""
