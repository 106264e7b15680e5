"""What people and programs are told: status, conditions, events."""
