"""Sizing: predict the speed, plan the pools. A library that needs no cluster."""
