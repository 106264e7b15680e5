"""The process `shoal-operator`: settings, endpoints, and the wiring of the controllers."""
