"""Train in one process, without parameter servers: `python examples/digits/train.py`."""

from digits import job

if __name__ == "__main__":
    model = job.fit(epochs=15, batch_size=32)
