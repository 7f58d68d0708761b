"""The exceptions of pagedkv that Python does not have already."""


class CapacityError(MemoryError):
    """A pool or a table has no room for what was asked. Nothing has changed."""


class OutOfBlocksError(CapacityError):
    """The block pool has fewer free blocks than were asked for. Nothing has changed.

    Attributes
    ----------
    requested, free : int
        Blocks that were asked for, and blocks that could be handed out.

    Examples
    --------
    >>> import pagedkv
    >>> pool = pagedkv.BlockPool(2)
    >>> try:
    ...     blocks = pool.allocate(3)
    ... except pagedkv.OutOfBlocksError as error:
    ...     print(error.requested, error.free)
    3 2
    """

    def __init__(self, message: str, requested: int = 0, free: int = 0) -> None:
        super().__init__(message)
        self.requested = requested
        self.free = free


class BackendUnavailableError(RuntimeError):
    """The chosen backend needs a driver, a device or a package that is not here; the message says which."""
