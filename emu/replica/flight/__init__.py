"""What a replica is in the middle of, as one object of one of these classes."""
