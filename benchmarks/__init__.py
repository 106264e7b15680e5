"""Each module measures one thing beside a peer or a physical limit of the same run, and yields `Measurement`s."""
