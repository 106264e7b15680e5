"""Replaying revocation traces: what policies would have cost, and whether they would have been in time."""
