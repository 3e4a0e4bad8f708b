"""Kernel times: fitting the roofline's coefficients to measured tables, and judging them."""
