"""SGLang's scheduler: what it admits (`admission`), in which order (`orders`), what it takes back
(`retraction`), and the iterations that follow (`scheduler`)."""
