"""Models of other libraries, for the engine; each module here needs the extra of its own name."""
