"""Shoal keeps a TensorFlow training job moving while its spot GPU workers come and go."""

__version__ = "0.1.0"
