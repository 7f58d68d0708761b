"""``python -m pagedkv info``: what is installed here, what of pagedkv works, and what to install for the rest."""
