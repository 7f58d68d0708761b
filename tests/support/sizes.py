"""Sizes: what an object of the manager or the scheduler remembers, to hold it against what is alive."""

from collections import deque
from itertools import chain

CONTAINERS = (list, dict, set, deque)
ROOMS = ("pagedkv.cache", "pagedkv.memory", "pagedkv.scheduling")


def sizes_of(owner):
    """The length of every list, dict, set and deque that an object holds, or an object in it, by name."""
    sizes, seen, left = {}, set(), [("", owner)]
    while left:
        name, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, CONTAINERS):
            sizes[name] = len(value)
            left += ((f"{name}[]", item) for item in (value.values() if isinstance(value, dict) else value))
        elif type(value).__module__.startswith(ROOMS):
            slots = chain(*(getattr(kind, "__slots__", ()) for kind in type(value).mro()))
            held = getattr(value, "__dict__", {}) | {slot: getattr(value, slot, None) for slot in slots}
            left += ((f"{name}.{key}", item) for key, item in held.items() if key != "__weakref__")
    return sizes


def assert_sizes_follow(owner, num_alive):
    """No container has more than two entries for each thing that is alive, and a few."""
    too_many = {name: size for name, size in sizes_of(owner).items() if size > 2 * num_alive + 16}
    assert not too_many, f"{num_alive} alive"
