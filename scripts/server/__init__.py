"""OpenAI-compatible HTTP server over an asynchronous session."""
