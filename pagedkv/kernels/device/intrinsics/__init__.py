"""Device functions of one or a few instructions, by who executes one: a thread, a warp, a warpgroup."""
