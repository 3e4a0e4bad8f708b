"""Traces of the requests that clients send, for a collector of OpenTelemetry."""
