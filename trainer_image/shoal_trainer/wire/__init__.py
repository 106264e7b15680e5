"""The data plane between workers and parameter servers: transport, handshake, header and messages."""
