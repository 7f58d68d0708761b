"""Prefill attention: ragged runs of query tokens over paged keys and values."""
