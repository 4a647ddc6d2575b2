"""The OpenAI server: HTTP API, metrics, the live page."""
