"""Availability of nodes: a pool as a process of nodes that are there, and what a job gets done on it.

One engine for `shoal plan`, `shoal simulate`, `shoal calibrate` and the operator.
"""
