"""The custom resources as pydantic models, generators of their CRDs and reference, and slim views of pods and nodes."""
