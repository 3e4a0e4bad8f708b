"""Back ends of latency that need another program or its data."""
