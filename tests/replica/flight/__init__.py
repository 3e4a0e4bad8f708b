"""What a replica is in the middle of, flight by flight."""
