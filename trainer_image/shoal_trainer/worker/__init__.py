"""The worker: a Keras model on one side, parameter servers and coordinator on the other."""
