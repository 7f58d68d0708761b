"""pagedkv under other libraries, each imported by those who use it."""
