"""Seeing and touching the cluster: one client, caches that reflectors keep true, a work queue, a Lease."""
