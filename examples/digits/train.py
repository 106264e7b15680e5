"""The same training alone, in one process: `python examples/digits/train.py`."""

from digits import job

if __name__ == "__main__":
    model = job.fit(epochs=15, batch_size=32)
