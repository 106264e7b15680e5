"""`shoal-trainer run`: the processes of a job on this machine, and what the console shows of it."""
