"""The controller of CapacityPools: sums up what jobs used and met in a pool, and says what size it should have."""
