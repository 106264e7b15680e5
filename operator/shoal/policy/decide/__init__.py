"""What follows from the facts: what is wanted, what was lost, what is created and deleted, whether the job ended."""
