"""The story of the pools: a job with a deadline, on machines that a played cloud makes, refuses and takes."""
