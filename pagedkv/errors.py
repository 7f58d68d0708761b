"""The exceptions of pagedkv that Python does not define."""


class CapacityError(MemoryError):
    """A pool or a table has no room for the request. Nothing has changed."""


class OutOfBlocksError(CapacityError):
    """The block pool has fewer free blocks than a call needs. Nothing has changed.

    Attributes
    ----------
    requested, free : int
        Blocks that the call needs, and blocks that the pool could hand out.

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
    """The chosen backend needs a driver, a device or a package that is missing; the message says which."""
