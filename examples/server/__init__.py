"""The parts of serve.py: HTTP, the protocol, texts, the engines and their thread, and the status page."""
