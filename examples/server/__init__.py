"""The parts of serve.py: the protocol, the texts, the engines and their thread, and what it says of itself."""
