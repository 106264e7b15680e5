"""Replay revocation traces: the cost of policies, and whether they meet the deadline."""
