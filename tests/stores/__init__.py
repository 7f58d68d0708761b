"""Tests of stores outside of a cache."""
