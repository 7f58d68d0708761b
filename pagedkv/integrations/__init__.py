"""Integrations with other libraries; import the one that you use."""
