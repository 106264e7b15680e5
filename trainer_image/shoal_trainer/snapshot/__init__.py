"""Snapshots: the files of all shards, published at once by one manifest."""
