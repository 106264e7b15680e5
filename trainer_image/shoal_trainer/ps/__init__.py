"""The parameter server: one shard of the parameters, its optimizer, and the client that workers use."""
