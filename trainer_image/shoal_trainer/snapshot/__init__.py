"""Snapshots: files of shards that become visible all at once, by one manifest."""
