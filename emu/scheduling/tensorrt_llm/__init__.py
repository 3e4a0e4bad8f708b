"""TensorRT-LLM's scheduler: which requests fit (`capacity`), how many tokens of each a step has
(`chunks`), and the iterations that follow (`scheduler`)."""
