"""What travels between a worker and a parameter server: header, messages, handshake, transport."""
