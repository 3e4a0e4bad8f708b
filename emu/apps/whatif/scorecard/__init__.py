"""A scorecard of an outside router, from the recording of a live server."""
