"""The numpy core of the predictor: measurements in, step times with intervals out.

The operator imports this; pandas, scipy and scikit-learn stay out of it (docs/sizing-model.md has the formulas).
"""
