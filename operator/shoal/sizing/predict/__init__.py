"""The predictor: from measurements to speeds and times, each with a 90 % prediction interval."""
