"""The custom resources as pydantic models, the generators of their CRDs and reference, and slim views of pods and nodes."""
