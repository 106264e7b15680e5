"""Time and words, for all rooms."""
