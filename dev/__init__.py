"""Tools for developers of Shoal."""
