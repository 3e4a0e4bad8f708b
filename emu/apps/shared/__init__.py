"""What several applications use: answers, points and their runs, an HTTP client."""
