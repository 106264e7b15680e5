"""Makes a CapacityPool the recommended size: what `shoal-pools` does, in a process and with rights of its own."""
