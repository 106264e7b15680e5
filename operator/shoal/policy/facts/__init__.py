"""What was seen, read once: pods with their places, verdicts and the signals of their nodes; the coordinator's view."""
