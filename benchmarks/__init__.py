"""Each module compares one quantity with a peer or a physical limit in the same run, and yields `Measurement`s."""
