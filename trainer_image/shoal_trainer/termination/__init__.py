"""How a process of a job ends: in time, at SIGTERM, with its parent, and with a message."""
