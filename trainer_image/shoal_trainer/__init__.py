"""The trainer of Shoal: asynchronous parameter servers and the workers that come and go around them."""
