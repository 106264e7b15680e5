"""Snapshots: one file per shard, published together by one manifest."""
