"""The worker: trains a Keras model with parameters from the parameter servers and work from the coordinator."""
