"""Tools of the developers of Shoal."""
